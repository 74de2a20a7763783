/* The tables of a run's page. */

import { fill, folded, h, table } from "./dom.js";
import { ageMark, clip, moment, number, percent, plural, seconds, token, value, whole } from "./format.js";
import { change, get } from "./state.js";

const SHOWN = 15;
const SINGLES = 12;
const PAIRS = ["Pair", "Steps", "Largest D(S)", "Last at step"];

const about = (text) => h("p", { class: "about" }, text);

/** A number, and behind it a bar as long as its share of the largest. */
function barred(size, largest, text) {
  const width = `${Math.max(2, (100 * size) / largest)}%`;
  return h("span", { class: "bar-cell" }, h("i", { style: { width } }), h("span", {}, text));
}

/** The pairs of tokens that attained the diameter, most frequent first. */
export function tokenPairs({ tokens, token_rows: singles = [] }) {
  const title = h("h2", {}, "Tokens that moved most");
  if (!tokens.length) return [title, about("No exact diameter has been measured yet.")];
  const most = Math.max(...tokens.map((one) => one.count));
  const row = ({ pair, texts, count, share, largest, last_step: last }) => [
    pairOf(texts, pair),
    barred(count, most, `${whole(count)} (${percent(share)})`),
    number(largest),
    h("a", { href: `?step=${last}` }, whole(last)),
  ];
  const part = (some) => table(PAIRS, some.map(row), { class: "tokens" });
  const rest = tokens.slice(SHOWN);
  const alone = singles.slice(0, SINGLES).map(single);
  return [
    title,
    about("Pairs that attained the exact diameter, most frequent first"),
    alone.length ? h("p", { class: "singles" }, h("small", {}, "One by one"), alone) : null,
    part(tokens.slice(0, SHOWN)),
    rest.length ? h("details", {}, h("summary", {}, plural(rest.length, "more pair")), part(rest)) : null,
  ];
}

function pairOf(texts, ids) {
  const versus = h("span", { class: "versus" }, "↔");
  const [first, second] = ids.map((id, i) => token(texts?.[i], id));
  const named = texts?.some((text) => text !== null);
  return h("span", { class: "pair" }, first, versus, second, named ? h("small", {}, ids.join(", ")) : null);
}

function single({ token: id, text, count }) {
  return h("span", { title: `token ${id}` }, token(text, id), h("small", {}, whole(count)));
}

/** What measuring took, by part. */
export function cost({ share_mean: mean, share_last: last, seconds: parts = {}, records = 0 }) {
  const title = h("h2", {}, "Cost of the monitor");
  const rows = Object.entries(parts).sort(([, a], [, b]) => b - a);
  if (value(mean) === null && !rows.length) return [title, about("Not measured yet.")];
  const most = Math.max(...rows.map(([, took]) => took), 1e-12);
  const row = ([name, took]) => [name.replaceAll("_", " "), barred(took, most, seconds(took))];
  return [
    title,
    about(`${percent(mean)} of the time between records, ${percent(last)} at the last; ${plural(records, "record")}`),
    rows.length ? table(["Part", "Mean time"], rows.map(row)) : null,
  ];
}

/** The attempts: the processes that wrote the run, and the step from which each began. */
export function attempts({ attempts: infos, summary }) {
  const resumed = (step) => h("a", { href: `?step=${step}` }, `resumed from step ${whole(step)}`);
  const row = (info, i) => [
    whole(info.attempt ?? i + 1),
    info.first_step ? resumed(info.first_step) : "from the start",
    h("span", {}, moment(info.started), " (", ageMark(info.started), ")"),
    `${info.host || "?"}, process ${info.pid ?? "?"}`,
    i === infos.length - 1 ? summary.status : "resumed by the next",
  ];
  return [h("h2", {}, "Attempts"), table(["Attempt", "Began", "When", "Where", "State"], infos.map(row))];
}

/** The configuration, with a filter that is in the address. */
export function configuration() {
  const filter = h("input", {
    type: "search",
    id: "filter",
    placeholder: "Filter settings",
    "aria-label": "Filter settings",
    autocomplete: "off",
    spellcheck: "false",
    value: get("config") ?? "",
    oninput: () => {
      change({ config: filter.value.trim() || null });
      draw();
    },
  });
  const place = h("div", {});
  const heading = h("div", { class: "heading" }, h("h2", {}, "Configuration"), filter);
  const row = ([key, text]) => [h("code", {}, clip(key, 200)), clip(String(text), 600)];
  let settings = [];
  const draw = () => {
    const words = (get("config") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = ([key, text]) => words.every((word) => `${key}=${text}`.toLowerCase().includes(word));
    const rows = settings.filter(wanted).map(row);
    const none = settings.length ? "No setting matches." : "This run recorded no configuration.";
    fill(place, rows.length ? table(["Setting", "Value"], rows, { class: "settings" }) : about(none));
  };
  return {
    show(config) {
      settings = config ?? [];
      filter.hidden = settings.length < 6;
      draw();
      return [heading, place];
    },
  };
}

/** Remarks on the numbers, versions, and the machine of the run. */
export function origin(info) {
  const remark = (text) => h("li", {}, folded(clip(text, 2000)));
  const remarks = (info.remarks ?? []).map(remark);
  const size = info.panel_size ? `, ${plural(info.panel_size, "position")}` : "";
  const facts = [
    ["Host", [info.host, info.pid ? `process ${info.pid}` : null].filter(Boolean).join(", ")],
    ["Ranks", whole(info.world_size ?? 1)],
    ["Panel", info.panel_hash ? clip(info.panel_hash, 24) + size : "none"],
    ...Object.entries(info.versions ?? {}),
  ];
  const fact = ([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(text)));
  return [
    remarks.length ? [h("h2", {}, "Remarks"), h("ul", { class: "remarks" }, remarks)] : null,
    h("h2", {}, "Origin"),
    h("dl", { class: "facts" }, facts.filter(([, text]) => text).map(fact)),
  ];
}
