/* Numbers, times and token texts as people read them. */

export const DASH = "–";
const MINUS = "−";
const SUPERSCRIPT = { "-": "⁻", ...["⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"] };

let skew = 0;

/** Take over the server's clock from the date of an answer, if it differs from ours. */
export function setClock(date) {
  const server = Date.parse(date ?? "");
  if (!Number.isNaN(server)) skew = Math.abs(server - Date.now()) > 3000 ? server - Date.now() : 0;
}

/** Now, in seconds since the epoch, on the server's clock. */
export const now = () => (Date.now() + skew) / 1000;

/** A number of the API, in which nan and infinities are strings; null where there is none. */
export function value(given) {
  if (given === null || given === undefined || given === "") return null;
  const spelt = { nan: NaN, inf: Infinity, "-inf": -Infinity }[given];
  return spelt === undefined ? Number(given) : spelt;
}

/** A number with separators. Intl does the same, but a page that asks it for the first time waits 30 ms. */
export const grouped = (x) => String(x).replace(/^-?\d+/, (whole) => whole.replace(/\B(?=(\d{3})+$)/g, ","));

/** A number in some digits: plain where that is short, else times a power of ten. */
export function number(given, digits = 4) {
  const x = value(given);
  if (x === null) return DASH;
  if (Number.isNaN(x)) return "nan";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : `${MINUS}∞`;
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 0.01 && size < 1e5) return minus(grouped(Number(x.toPrecision(digits))));
  const [mantissa, power] = x.toExponential(digits - 1).split("e");
  return `${minus(mantissa)} × 10${[...String(Number(power))].map((sign) => SUPERSCRIPT[sign]).join("")}`;
}

/** A number with so many decimals. */
export function fixed(given, decimals = 4, signed = false) {
  const x = value(given);
  if (x === null || !Number.isFinite(x)) return number(x);
  return minus((signed && x >= 0 ? "+" : "") + x.toFixed(decimals));
}

/** A whole number, with separators. */
export function whole(given) {
  const x = value(given);
  return x === null ? DASH : grouped(x);
}

/** A mean and its deviation. */
export function spread(given, form = number) {
  if (!given || value(given.mean) === null) return DASH;
  const mean = form(given.mean);
  return value(given.deviation) === null ? mean : `${mean} ± ${number(given.deviation, 2)}`;
}

/** A share in percent. */
export function percent(given) {
  const x = value(given);
  if (x === null || !Number.isFinite(x)) return number(x);
  const size = 100 * x;
  return `${Number(size.toPrecision(size >= 10 ? 3 : 2))} %`;
}

/** Seconds in the unit that suits them. */
export function seconds(given) {
  const x = value(given);
  if (x === null) return DASH;
  if (x < 1e-3) return `${number(x * 1e6, 3)} µs`;
  return x < 1 ? `${number(x * 1e3, 3)} ms` : `${number(x, 3)} s`;
}

/** A time that is long, in the two units that suit it: "2 days 3 h". */
export function duration(given) {
  const x = value(given);
  if (x === null || !Number.isFinite(x)) return DASH;
  if (x < 59.5) return `${Math.round(x)} s`;
  const minutes = Math.round(x / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  const days = Math.floor(hours / 24);
  return hours % 24 ? `${plural(days, "day")} ${hours % 24} h` : plural(days, "day");
}

/** "3 runs", "1 run". */
export const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

/** A moment of the API as a date; null for one that no calendar has, as any number may be in a log. */
function date(time) {
  const at = new Date((value(time) ?? NaN) * 1000);
  return time && !Number.isNaN(at.getTime()) ? at : null;
}

/** How long ago a moment was. */
export function age(time) {
  const passed = Math.max(0, now() - time);
  if (passed < 1.5) return "now";
  if (passed < 90) return `${Math.round(passed)} s ago`;
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 129600) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86400)} days ago`;
}

/** A moment as date and time. */
export const moment = (time) => date(time)?.toLocaleString(
  undefined,
  { dateStyle: "medium", timeStyle: "medium" },
) ?? DASH;

/** An element that says how long ago a moment was, and keeps saying it. */
export function ageMark(time) {
  const element = document.createElement("time");
  const at = date(time);
  if (!at) {
    element.textContent = DASH;
    return element;
  }
  element.dataset.at = time;
  element.dateTime = at.toISOString();
  element.title = moment(time);
  element.textContent = age(time);
  return element;
}

/** Bring every age on the page up to date. */
export function tick() {
  for (const element of document.querySelectorAll("time[data-at]")) {
    const text = age(Number(element.dataset.at));
    if (element.textContent !== text) element.textContent = text;
  }
}

const MARKS = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽" };
const UNSEEN = /[\s\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\ufffd]/;

/** A token's text in quotes, with visible signs for characters that cannot be seen; its id where there is no text. */
export function token(text, id = null) {
  const element = document.createElement("span");
  element.className = "token";
  if ((text ?? null) === null && id !== null) {
    element.append(`token ${id}`);
    return element;
  }
  element.append("“");
  for (const sign of clip(String(text ?? ""), 80)) {
    if (!UNSEEN.test(sign)) element.append(sign);
    else {
      const mark = document.createElement("i");
      mark.textContent = MARKS[sign] ?? `U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
      element.append(mark);
    }
  }
  element.append("”");
  element.normalize();
  return element;
}

/** A text of at most so many characters. */
export function clip(text, limit) {
  return text.length > limit ? `${text.slice(0, limit - 1)}…` : text;
}

const minus = (text) => text.replace("-", MINUS);
