// The steps of a run: a table, and a chart for each metric.

const CHART = { width: 520, height: 160, left: 64, top: 12, bottom: 22 };

/** Numbers short enough for an axis. */
function shortText(number) {
  return Number(number.toPrecision(4)).toString();
}

/** A metric over the steps; what is not finite has no point. */
function chartOf(name, steps) {
  const points = steps.filter((step) => typeof (step.metrics ?? {})[name] === "number").map((step) => [step.number, step.metrics[name]]);
  const span = (values) => [Math.min(...values), Math.max(...values)];
  const [first, last] = span(points.map(([x]) => x));
  const [least, largest] = span(points.map(([, y]) => y));
  const { width, height, left, top, bottom } = CHART;
  const across = (x) => left + ((x - first) / (last - first || 1)) * (width - left - 8);
  const up = (y) => height - bottom - ((y - least) / (largest - least || 1)) * (height - bottom - top);
  const line = points.map(([x, y]) => `${across(x)},${up(y)}`).join(" ");
  const dots = points.map(([x, y]) => draw("circle", { class: "chartdot", cx: across(x), cy: up(y), r: 3 }, draw("title", {}, `step ${x}: ${y}`)));
  const label = `${name}: from ${shortText(least)} to ${shortText(largest)} over steps ${first} to ${last}`;
  const floor = height - bottom;
  return draw("svg", { class: "picture chart", role: "img", "aria-label": label, viewBox: `0 0 ${width} ${height}`, width, height },
    draw("line", { class: "axisline", x1: left, x2: width, y1: floor, y2: floor }), draw("polyline", { class: "chartline", points: line }), dots,
    draw("text", { x: left - 6, y: top + 4, "text-anchor": "end" }, shortText(largest)), draw("text", { x: left - 6, y: floor, "text-anchor": "end" }, shortText(least)),
    draw("text", { x: left, y: height - 5 }, first), draw("text", { x: width, y: height - 5, "text-anchor": "end" }, last));
}

/** A metric in a table; what is not finite is a text already. */
function metricText(value) {
  return typeof value === "number" ? String(Number(value.toPrecision(6))) : value ?? "";
}

/** The panel of a run. */
function runView(page) {
  const steps = page.run;
  const names = [...new Set(steps.flatMap((step) => Object.keys(step.metrics ?? {})))];
  const link = (step) => (page.served ? make("a", { href: `steps/${encodeURIComponent(step.name)}/` }, step.name) : step.name);
  const rows = steps.map((step) => {
    const shared = step.shared ?? 0;
    const size = step.format && step.format !== "xckpt" ? [step.format, ""] : [bytesText((step.bytes ?? 0) - Math.min(shared, step.bytes ?? 0)), bytesText(shared)];
    return [link(step), step.time ?? "", ...size, ...names.map((name) => metricText((step.metrics ?? {})[name])), (step.kept_by ?? []).join(", ")];
  });
  const numbers = [2, 3, ...names.map((_, at) => at + 4)];
  const table = tableOf(["Step", "Saved (UTC)", "Own", "Shared", ...names, "Kept by"], rows, numbers, { id: "steps" });
  const charts = names.filter((name) => steps.some((step) => typeof (step.metrics ?? {})[name] === "number"));
  return make("div", {}, charts.flatMap((name) => [make("h3", {}, name), chartOf(name, steps)]), make("h3", {}, counted(steps.length, "step")), table);
}
