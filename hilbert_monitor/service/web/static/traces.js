/* The traces of a figure: their names, the keys by which they are hidden, and what the page gives to Plotly. */

const PLAIN = { "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#x27;": "'", "&#39;": "'", "&amp;": "&" };

/** Undo the escapes that Plotly needs. */
export const plain = (text) => String(text ?? "").replace(/&(?:lt|gt|quot|#x27|#39|amp);/g, (escape) => PLAIN[escape]);

/** The key by which a curve is hidden. All curves of a group share it, in every panel. */
export const keyOf = (trace) => plain(trace.legendgroup || trace.name);

/** Whether a trace is a row of marks, such as alerts, which stand on an axis of their own. */
export const isMarks = (trace) => trace.yaxis === "y2";

/** A trace, invisible if it is hidden. Plotly makes a CSS selector of its uid, so that must be plain. */
export function shownAs(trace, hidden) {
  const uid = trace.uid?.replace(/[^A-Za-z0-9-]/g, (sign) => `_${sign.codePointAt(0).toString(16)}`);
  return { ...trace, ...(uid && { uid }), ...(hidden.has(keyOf(trace)) && { visible: false }) };
}
