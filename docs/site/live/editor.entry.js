// The editor of the site: CodeMirror with Python, and marks beside lines. engine.py bundles it as editor.js.
import { HighlightStyle, syntaxHighlighting } from "@codemirror/language";
import { python } from "@codemirror/lang-python";
import { lintGutter, setDiagnostics } from "@codemirror/lint";
import { EditorView, keymap } from "@codemirror/view";
import { tags } from "@lezer/highlight";
import { basicSetup } from "codemirror";

const COLOURS = HighlightStyle.define([
  { tag: [tags.keyword, tags.operatorKeyword, tags.controlKeyword, tags.definitionKeyword], class: "mp-keyword" },
  { tag: [tags.string, tags.number, tags.bool], class: "mp-literal" },
  { tag: tags.comment, class: "mp-comment" },
]);

/** An editor in `place`; `run` answers Ctrl-Enter. */
export function makeEditor(place, text, label, run) {
  const answer = () => { run(); return true; };
  const view = new EditorView({
    doc: text,
    parent: place,
    extensions: [
      keymap.of([{ key: "Ctrl-Enter", run: answer }, { key: "Cmd-Enter", run: answer }]),
      basicSetup, python(), lintGutter(), syntaxHighlighting(COLOURS), EditorView.lineWrapping,
      EditorView.contentAttributes.of({ "aria-label": label }),
    ],
  });
  return {
    text: () => view.state.doc.toString(),
    set: (words) => view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: words } }),
    /** Words beside a line, from 1; none for line 0. */
    mark(line, words) {
      const at = line > 0 && line <= view.state.doc.lines ? view.state.doc.line(line) : null;
      view.dispatch(setDiagnostics(view.state, at ? [{ from: at.from, to: at.to, severity: "error", message: words }] : []));
    },
  };
}
