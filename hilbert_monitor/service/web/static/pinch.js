/* Zoom with two fingers: apart from left to right the x axis, apart from top to bottom the y axis. One finger scrolls the
 * page, as everywhere; two taps show the whole range. */

const LEAST = 24;
const DOUBLE = 350;

/**
 * Listen to the fingers on a plot.
 * @param {HTMLElement} plot
 * @param {(axis: "x" | "y", range: number[]) => void} zoom called when the fingers leave
 * @param {() => void} reset called after two taps
 */
export function listenToPinch(plot, zoom, reset) {
  let pinch = null;
  let tapped = -Infinity;
  let moved = false;
  const onstart = (event) => {
    moved = event.touches.length > 1;
    if (event.touches.length === 2 && plot._fullLayout) pinch = begin(plot, event.touches);
  };
  const onmove = (event) => {
    moved = true;
    if (!pinch || event.touches.length !== 2) return;
    event.preventDefault();
    const range = pinch.range(event.touches);
    if (range) Plotly.relayout(plot, { [`${pinch.axis}axis.range`]: (pinch.last = range) });
  };
  const onend = (event) => {
    if (pinch && event.touches.length < 2) {
      if (pinch.last) zoom(pinch.axis, pinch.last);
      pinch = null;
    } else if (!moved) {
      if (event.timeStamp - tapped < DOUBLE) reset();
      tapped = event.timeStamp;
    }
  };
  plot.addEventListener("touchstart", onstart, { passive: true });
  plot.addEventListener("touchmove", onmove, { passive: false });
  plot.addEventListener("touchend", onend);
  plot.addEventListener("touchcancel", onend);
}

/** Two fingers hold two places of an axis; the range is the one in which these stay under the fingers. */
function begin(plot, touches) {
  const [first, second] = touches;
  const across = Math.abs(first.clientX - second.clientX) >= Math.abs(first.clientY - second.clientY);
  const axis = across ? "x" : "y";
  const { _offset: offset, _length: length, range: [low, high] } = plot._fullLayout[`${axis}axis`];
  const box = plot.getBoundingClientRect();
  const share = (touch) => (across ? touch.clientX - box.left - offset : offset + length - (touch.clientY - box.top)) / length;
  const held = [first, second].map((touch) => low + share(touch) * (high - low));
  return {
    axis,
    last: null,
    range([one, other]) {
      const [a, b] = [share(one), share(other)];
      if (Math.abs(b - a) * length < LEAST || (b - a) * (held[1] - held[0]) <= 0) return null;
      const scale = (held[1] - held[0]) / (b - a);
      return [held[0] - a * scale, held[0] + (1 - a) * scale];
    },
  };
}
