// The words above a view take two lines at most. What has no room waits behind a button, which base.py writes beside them:
//
//   <div class="mp-head"><div class="mp-lines">...</div><button class="mp-more" aria-expanded="false" hidden>more</button></div>

const LINES = 2;

/** Fold all heads in an element, also those that come later; returns what ends this. */
export function folded(root) {
  const open = new WeakSet(); // places whose reader wants all: a new head in the same place is open, too
  const measure = (head) => {
    const [words, button] = head.children, wide = open.has(head.parentElement);
    const most = LINES * parseFloat(getComputedStyle(words).lineHeight), long = words.scrollHeight > most + 6;
    head.dataset.folded = long && !wide;
    button.hidden = !long;
    button.textContent = wide ? "less" : "more";
    button.setAttribute("aria-expanded", wide);
  };
  const all = () => root.isConnected && root.querySelectorAll(".mp-head").forEach(measure);
  let waiting = 0;
  const soon = () => { // (not at once: a size that changes while sizes are told is an error of the page)
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(all);
  };
  const clicked = ({ target }) => {
    const place = target.classList?.contains("mp-more") && target.closest(".mp-head")?.parentElement;
    if (!place) return;
    if (!open.delete(place)) open.add(place);
    all();
  };
  const sizes = new ResizeObserver(soon), changes = new MutationObserver((list) => {
    if (list.some((one) => !one.target.closest?.(".mp-more"))) soon();
  });
  sizes.observe(root);
  changes.observe(root, { childList: true, subtree: true });
  root.addEventListener("click", clicked);
  return () => {
    cancelAnimationFrame(waiting);
    sizes.disconnect();
    changes.disconnect();
    root.removeEventListener("click", clicked);
  };
}
