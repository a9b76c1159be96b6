"""The verdict of a memory explorer as HTML: whether a plan fits and what would make it fit, before everything else.

Its terms explain themselves to a pointer and to the keyboard: each can be focused, and shows its words then.
"""

from __future__ import annotations

import re
from dataclasses import fields
from html import escape

from minipar.prediction.memory_formula import size
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
_STYLE = """<style>
.mp-fit { border-left: 5px solid #009E73; padding: 0 12px; }
.mp-fit[data-fits="no"] { border-left-color: #c05000; }
.mp-fit ul { margin: 0; padding: 0; list-style: none; }
.mp-fit li { display: inline; margin-right: 12px; }
.mp-fit li::after { content: " "; }
.mp-term { position: relative; text-decoration: underline dotted; text-underline-offset: 3px; cursor: help; }
.mp-term > [role="tooltip"] { display: none; position: absolute; left: 0; top: 1.6em; z-index: 3; width: max-content;
  max-width: min(300px, 70vw); padding: 4px 9px; border: 1px solid #777; border-radius: 4px;
  font: 12px/1.45 system-ui, sans-serif;
  background: Canvas; color: CanvasText; background: var(--jp-layout-color0, Canvas);
  color: var(--jp-ui-font-color0, CanvasText);
  box-shadow: 0 1px 5px rgb(0 0 0 / 30%); }
.mp-term:hover > [role="tooltip"], .mp-term:focus > [role="tooltip"] { display: block; }
</style>
"""


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
        f'{_STYLE}<div class="mp-fit" role="status" data-fits="{"yes" if fits else "no"}">'
        f"<b>{mark} {escape(head)}</b>: {explained(rest)}<ul>{items}</ul></div>"
    )


def impossible(reason: str) -> str:
    """The reason why there is no plan to judge, in the verdict's place."""
    return f'{_STYLE}<div class="mp-fit" role="status" data-fits="no"><b>✗ No such plan</b>: {escape(reason)}</div>'


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
