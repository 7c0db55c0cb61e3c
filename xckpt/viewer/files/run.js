// The steps of a run: a chart for each metric, and a table of the steps.

const CHART = { width: 520, height: 170, left: 74, top: 12, bottom: 26, right: 10 };

/** Runs of points that follow each other: a value that is not finite parts them. */
function partsOf(points) {
  const parts = [[]];
  for (const [x, y] of points) {
    if (Number.isFinite(y)) parts.at(-1).push([x, y]);
    else if (parts.at(-1).length) parts.push([]);
  }
  return parts.filter((part) => part.length);
}

/** A metric over the steps; a value that is not finite is a cross on the axis. */
function chartOf(name, steps) {
  const points = steps.filter((step) => (step.metrics ?? {})[name] !== undefined).map((step) => [step.number, step.metrics[name]]);
  const finite = points.filter(([, y]) => Number.isFinite(y));
  const span = (values) => values.reduce(([low, high], each) => [Math.min(low, each), Math.max(high, each)], [Infinity, -Infinity]);
  const [first, last] = span(points.map(([x]) => x));
  const [least, largest] = span(finite.map(([, y]) => y));
  const { width, height, left, top, bottom, right } = CHART;
  const floor = height - bottom;
  const across = (x) => left + 8 + ((x - first) / (last - first || 1)) * (width - left - right - 8);
  const up = (y) => floor - 8 - (largest === least ? 0.5 : (y - least) / (largest - least)) * (floor - 8 - top);
  const lines = partsOf(points).map((part) => draw("polyline", { class: "chartline", points: part.map(([x, y]) => `${across(x)},${up(y)}`).join(" ") }));
  const dots = finite.map(([x, y]) => draw("circle", { class: "chartdot", cx: across(x), cy: up(y), r: 3.5 }, draw("title", {}, `step ${x}: ${y}`)));
  const crosses = points.filter(([, y]) => !Number.isFinite(y)).map(([x, y]) =>
    draw("path", { class: "chartcross", d: `M${across(x) - 4} ${floor - 4}l8 8m0 -8l-8 8` }, draw("title", {}, `step ${x}: ${y}`)));
  const label = `${name}: from ${shortText(least)} to ${shortText(largest)} over steps ${first} to ${last}${crosses.length ? `, ${numberText(crosses.length)} not finite` : ""}`;
  const sides = [[left, up(largest) + 4, shortText(largest, 4)]];
  if (largest !== least) sides.push([left, up(least) + 4, shortText(least, 4)]);
  return draw("svg", { class: "picture chart", role: "img", "aria-label": label, viewBox: `0 0 ${width} ${height}`, width, height },
    draw("line", { class: "axisline", x1: left, x2: width - right, y1: floor, y2: floor }), lines, dots, crosses,
    sides.map(([x, y, text]) => draw("text", { x: x - 6, y, "text-anchor": "end" }, text)),
    draw("text", { x: across(first), y: height - 7, "text-anchor": first === last ? "middle" : "start" }, `step ${first}`),
    first === last ? [] : draw("text", { x: across(last) + 4, y: height - 7, "text-anchor": "end" }, last));
}

/** A metric in a table; what is not finite is a text already. */
function metricText(value) {
  return typeof value === "number" ? shortText(value) : value ?? "";
}

/** Bytes of a step that are its own, and those that other checkpoints have too. */
function bytesOf(step) {
  const bytes = step.bytes ?? 0;
  const shared = Math.min(step.shared ?? 0, bytes);
  return { own: bytes - shared, shared };
}

/** One line on a run: what it takes, and what it would without sharing. */
function runSummary(steps, once) {
  const sum = (of) => steps.reduce((total, step) => total + of(step), 0);
  const alone = sum((step) => step.bytes ?? 0);
  const taken = sum((step) => bytesOf(step).own) + once;
  const shared = once ? `, which would be ${bytesText(alone)} if no files were shared` : "";
  return `a run of ${counted(steps.length, "step")}, ${bytesText(taken)}${shared}`;
}

/** A bar: the bytes that are a step's own, then those shared, of the most that a step has. */
function stepBar({ own, shared }, most) {
  return draw("svg", { class: "part", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
    draw("rect", { class: "barfill", x: 0, y: 0, width: (own / most) * 100, height: 10 }),
    draw("rect", { class: "sharedfill", x: (own / most) * 100, y: 0, width: (shared / most) * 100, height: 10 }));
}

/** The table of the steps, the newest first. */
function stepTable(page, names) {
  const steps = page.run;
  const most = Math.max(1, ...steps.map((step) => step.bytes ?? 0));
  const link = (step) => (page.served ? make("a", { href: `steps/${encodeURIComponent(step.name)}/` }, step.name) : step.name);
  const rows = steps.toReversed().map((step) => {
    const sizes = bytesOf(step);
    const size = step.format && step.format !== "xckpt" ? [step.format, "", ""] : [bytesText(sizes.own), bytesText(sizes.shared), stepBar(sizes, most)];
    return [link(step), step.time ?? "", ...size, ...names.map((name) => metricText((step.metrics ?? {})[name])), (step.kept_by ?? []).join(", ")];
  });
  const numbers = [2, 3, ...names.map((_, at) => at + 5)];
  return tableOf(["Step", "Saved (UTC)", "Own", "Shared", "Own and shared", ...names, "Kept by"], rows, numbers, { id: "steps" });
}

/** The panel of a run. */
function runView(page) {
  const steps = page.run;
  const names = [...new Set(steps.flatMap((step) => Object.keys(step.metrics ?? {})))];
  const charts = names.filter((name) => steps.some((step) => typeof (step.metrics ?? {})[name] === "number"));
  const drawn = charts.map((name) => make("section", {}, make("h3", {}, name), chartOf(name, steps)));
  return make("div", {}, make("div", { class: "charts" }, drawn), make("h3", {}, counted(steps.length, "step")), stepTable(page, names),
    make("p", { class: "note" }, "Own: bytes of files that no other checkpoint has. Shared: files that others have too, which a deletion does not free. Kept by: the rules that keep a step; what no rule keeps is deleted with a later save."));
}
