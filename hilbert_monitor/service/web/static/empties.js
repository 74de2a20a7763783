/* Notices for views that have nothing to show; they say what to do. */

import { code, empty, h, tool } from "./dom.js";
import { clip, plural } from "./format.js";
import { about } from "./store.js";

/** No runs yet. */
export function noRuns() {
  const folder = about.root || "this folder";
  const monitor = code(`HilbertMonitor(run_dir="${folder}")`);
  return empty(
    `No runs in ${folder} yet`,
    h("p", {}, "Train with ", monitor, ". Runs appear here by themselves."),
    h(
      "p",
      {},
      code("hilbert-monitor demo"),
      " trains a pair to look at. It writes to demo/runs of the folder that it is started in, and prints the address of",
      " a dashboard of its own.",
    ),
  );
}

/** No run matches the filter. */
export function noMatch(clear) {
  const examples = ["status:failed", "lr>0.01", "-adamw", '"two words"', "a OR b"];
  const fields = ["All words must occur. ", examples.map((one) => [code(one), " "]), "narrow or widen the filter. "];
  return empty("No run matches", h("p", {}, fields, tool("Show all runs", clear)));
}

/** Only archived runs match the filter. */
export function onlyArchived(count, show) {
  return empty("All runs that match are archived", h("p", {}, tool(`Show ${plural(count, "archived run")}`, show)));
}

/** There is no run with this id. */
export function unknownRun(id) {
  const all = h("a", { href: "/runs" }, "See all runs");
  return empty(
    "There is no such run",
    `“${clip(id, 100)}” is not among the runs that are served.`,
    h("p", {}, "It may have been renamed or removed, or it has not begun. ", all),
  );
}

/** There is no view at this address. */
export function noPage() {
  const [compare, all] = [h("a", { href: "/" }, "Compare"), h("a", { href: "/runs" }, "see all runs")];
  return empty("There is no such page", h("p", {}, compare, " or ", all));
}

/** The server needs a token. */
export function locked() {
  const link = ["This page needs its token: open the link that ", code("hilbert-monitor serve"), " printed."];
  return empty("This page needs its token", h("p", {}, link));
}

/** The server refused the request. */
export function refused(message) {
  const plain = h("a", { href: location.pathname }, "Show it without these settings");
  return empty("That cannot be shown", message, h("p", {}, plain));
}
