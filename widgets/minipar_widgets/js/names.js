// The invisible widget of an explorer (naming.py): it names the handles of sliders, and folds the words above the views.
import { folded } from "./folding.js";

function render({ el }) {
  let root, changes, unfold;
  const name = () => {
    for (const handle of root.querySelectorAll(".noUi-handle:not([aria-label])")) {
      const label = handle.closest(".widget-slider")?.querySelector(".widget-label")?.textContent.trim();
      if (label) handle.setAttribute("aria-label", label);
    }
  };
  const placed = new ResizeObserver(() => { // it is in the page now
    root = el.closest(".minipar-explorer");
    if (!root || changes) return;
    changes = new MutationObserver((list) => {
      if (list.some((one) => one.addedNodes[0]?.nodeType === Node.ELEMENT_NODE)) name();
    });
    changes.observe(root, { childList: true, subtree: true });
    unfold = folded(root);
    name();
  });
  el.style.height = 0;
  placed.observe(el);
  return () => {
    placed.disconnect();
    changes?.disconnect();
    unfold?.();
  };
}

export default { render };
