"""The verdict of a memory explorer as HTML: whether a plan fits and what would make it fit, before everything else.

Its terms explain themselves to a pointer and to the keyboard: each can be focused, and shows its words then.
"""

from __future__ import annotations

import re
from dataclasses import fields
from html import escape

from minipar.costs.quantities import size
from minipar.strategies.plan import Plan
from minipar_widgets.memory_model import Memory

KINDS = {
    "parameters": "the numbers that are trained",
    "gradients": "one number for each parameter, from the backwards",
    "optimizer": "what Adam keeps for each parameter: two averages of gradients; with bf16 the parameter in float32",
    "activations": "what forwards keep until their backwards need it",
    "buffers": "room for messages and collectives",
}
_KEYS = {field.name: field.metadata["key"].help for field in fields(Plan) if "key" in field.metadata}
_CHANGE = re.compile(r"\b([a-z_]+)=[\w,.]+")


def html(memory: Memory) -> str:
    """The sentence, and under it what the fullest rank holds, kind by kind."""
    worst = memory.details[memory.worst].memory
    fits = worst.total <= memory.choice.capacity
    head, _, rest = memory.verdict.partition(": ")
    mark = "✓" if fits else "✗"
    items = ""
    for one in memory.terms(memory.worst):
        meaning = f"{KINDS[one.kind]}; {one.note}" if one.note else KINDS[one.kind]
        items += f"<li>{term(one.kind, meaning)} {escape(size(one.bytes))}</li>"
    return (
        f'<div class="mp-fit" role="status" data-fits="{"yes" if fits else "no"}">'
        f"<b>{mark} {escape(head)}</b>: {explained(rest)}<ul>{items}</ul></div>"
    )


def impossible(reason: str) -> str:
    """The reason why there is no plan to judge, in the verdict's place."""
    return f'<div class="mp-fit" role="status" data-fits="no"><b>✗ No such plan</b>: {escape(reason)}</div>'


def explained(text: str) -> str:
    """A text as HTML, in which changes of a plan, such as zero=1, say what their key means."""
    parts, at = [], 0
    for found in _CHANGE.finditer(text):
        if found[1] in _KEYS:
            parts += [escape(text[at : found.start()]), term(found[0], _KEYS[found[1]])]
            at = found.end()
    return "".join([*parts, escape(text[at:])])


def term(words: str, meaning: str) -> str:
    """Words that show their meaning while the pointer is over them, or while they have the focus."""
    return f'<span class="mp-term" tabindex="0">{escape(words)}<span role="tooltip">{escape(meaning)}</span></span>'
