// Dynamics: three figures, and under two of them a sentence that follows the hand.
import {start} from "./lab.js";

start({preview(answer) {
  for (const [name, words] of Object.entries(answer.words)) document.getElementById(`says-${name}`).textContent = words;
}});
