"""The proof that a program can run, or the shortest explanation of why not: `verifier.verify`. No torch here."""
