// The head of a page: its words on two lines.
import { folded } from "./folding.js";

function start(place) {
  folded(document.getElementById(place));
}

export default { start };
