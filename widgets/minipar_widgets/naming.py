"""Names for the handles of sliders, for screen readers: Jupyter's own sliders have their name only beside them."""

from __future__ import annotations

import anywidget

EXPLORER = "minipar-explorer"  # the CSS class of what is searched for handles


class Names(anywidget.AnyWidget):
    """Nothing to see: names the handles of all sliders of the explorer that it is in, now and when more appear."""

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
