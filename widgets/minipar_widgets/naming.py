"""Names of slider handles for screen readers: in Jupyter's own sliders the name is only beside the handle."""

from __future__ import annotations

import anywidget

EXPLORER = "minipar-explorer"  # the CSS class of the elements in which handles are searched


class Names(anywidget.AnyWidget):
    """An invisible widget. It names the handles of all sliders of its explorer, also of sliders that appear later."""

    _esm = """
function render({ el }) {
  let root, changes;
  const name = () => {
    for (const handle of root.querySelectorAll(".noUi-handle:not([aria-label])")) {
      const label = handle.closest(".widget-slider")?.querySelector(".widget-label")?.textContent.trim();
      if (label) handle.setAttribute("aria-label", label);
    }
  };
  const placed = new ResizeObserver(() => { // it is in the page now
    root = el.closest(".EXPLORER");
    if (!root || changes) return;
    changes = new MutationObserver((list) => {
      if (list.some((one) => one.addedNodes[0]?.nodeType === Node.ELEMENT_NODE)) name();
    });
    changes.observe(root, { childList: true, subtree: true });
    name();
  });
  el.style.height = 0;
  placed.observe(el);
  return () => {
    placed.disconnect();
    changes?.disconnect();
  };
}
export default { render };
""".replace("EXPLORER", EXPLORER)
