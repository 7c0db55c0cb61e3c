// The values of a slice, asked of the server: a heat map, a histogram, and what is not finite.

/** A colour between two, four times: viridis' way from dark to light, read by any colour vision. */
const SCALE = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const NOT_FINITE = [213, 94, 0];

function shade(part) {
  const at = Math.max(0, Math.min(1, part)) * (SCALE.length - 1);
  const low = Math.min(SCALE.length - 2, Math.floor(at));
  return SCALE[low].map((value, band) => Math.round(value + (SCALE[low + 1][band] - value) * (at - low)));
}

/** A canvas with a pixel for each cell of rows of numbers, as large as the picture of the plane; null is a cell with
 * an element that is not finite. Colours run from the least cell to the largest: means lie closer than elements do. */
function heatMap(answer) {
  const { rows, columns, cells } = answer;
  const { least, largest } = cells.reduce((ends, cell) => (cell === null ? ends : { least: Math.min(ends.least, cell), largest: Math.max(ends.largest, cell) }), { least: Infinity, largest: -Infinity });
  const label = `Heat map of ${counted(rows, "row")} and ${counted(columns, "column")}, ${coloursText(least, largest)}`;
  const canvas = make("canvas", { class: "heat", role: "img", width: columns, height: rows, "aria-label": label });
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  const span = largest - least || 1;
  cells.forEach((value, at) => {
    const colour = value === null ? NOT_FINITE : shade((value - least) / span);
    image.data.set([...colour, 255], at * 4);
  });
  context.putImageData(image, 0, 0);
  const { width, height } = pixels(answer.down, answer.across);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const notes = [
    cells.some((cell) => cell !== null) ? `Colours run ${coloursText(least, largest)}.` : "",
    cells.length < answer.count ? `A cell is the mean of about ${numberText(Math.round(answer.count / cells.length))} elements.` : "",
    cells.includes(null) ? "Cells in orange hold NaN or infinity." : "",
  ];
  return make("figure", {}, canvas, make("figcaption", {}, notes.filter(Boolean).join(" ")));
}

/** "from -1 (dark) to 2 (light)" */
function coloursText(least, largest) {
  return `from ${numberOr(least)} (dark) to ${numberOr(largest)} (light)`;
}

/** Bars of a histogram of equal bins. */
function histogram(answer) {
  const { bins, least, largest } = answer;
  const most = Math.max(...bins, 1);
  const width = 480;
  const height = 120;
  const step = width / bins.length;
  const bars = bins.map((count, at) => {
    const tall = (count / most) * height;
    return draw("rect", { class: "barfill", x: at * step, y: height - tall, width: Math.max(step - 1, 0.5), height: tall }, draw("title", {}, numberText(count)));
  });
  const label = `Histogram of ${counted(bins.length, "bin")} from ${least} to ${largest}`;
  return draw("svg", { class: "picture", role: "img", "aria-label": label, viewBox: `0 0 ${width} ${height + 18}`, width, height: height + 18 },
    bars, draw("line", { class: "axisline", x1: 0, x2: width, y1: height, y2: height }),
    draw("text", { x: 0, y: height + 14 }, numberOr(least)), draw("text", { x: width, y: height + 14, "text-anchor": "end" }, numberOr(largest)));
}

/** A number short enough to read, or null. */
const numberOr = (number) => (number === null ? null : shortText(number));

/** Ask the server; a refusal becomes an error with its text. */
async function ask(question, parameters) {
  const { token } = pageShown;
  const response = await fetch(`${question}?${new URLSearchParams({ ...parameters, ...(token ? { token } : {}) })}`).catch(() => {
    throw new Error("No answer: the server of this page has ended. Start xckpt view again.");
  });
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

/** A Python value that is stored as bytes. */
async function showText(into, leaf) {
  into.replaceChildren(make("p", { class: "note" }, "reading …"));
  try {
    const { text, characters } = await ask("text", { leaf });
    into.replaceChildren(make("pre", {}, text));
    const shown = [...text].length;
    if (shown < characters) into.append(make("p", { class: "note" }, `the first ${numberText(shown)} of ${numberText(characters)} characters`));
    say("Value read");
  } catch (error) {
    into.replaceChildren(problem(error));
  }
}

/** What the values of a plane are like. */
async function showValues(into, leaf, plane) {
  into.replaceChildren(make("p", { class: "note" }, "reading …"));
  try {
    const answer = await ask("values", { leaf, down: plane.down ?? -1, across: plane.across ?? -1, at: plane.at.join(",") });
    const facts = [
      ["Elements", `${numberText(answer.count)}${answer.part ? ` (${answer.part})` : ""}`], ["Least", numberOr(answer.least)], ["Largest", numberOr(answer.largest)], ["Mean", numberOr(answer.mean)],
      ["NaN", numberText(answer.nans)], ["+ infinity", numberText(answer.positive)], ["- infinity", numberText(answer.negative)],
    ];
    into.replaceChildren(factsOf(facts.map(([term, text]) => [term, text === null ? "none" : String(text)])), ...(answer.count > 1 ? [heatMap(answer)] : []), ...(answer.bins.length > 1 ? [histogram(answer)] : []));
    say(`Values read: ${numberText(answer.count)} elements, ${numberText(answer.nans)} NaN`);
  } catch (error) {
    into.replaceChildren(problem(error));
  }
}
