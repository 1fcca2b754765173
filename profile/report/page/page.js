"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const run = data.run, other = data.other || null;
  const WIDTH = 1000, HEIGHT = 320;
  const STATES = ["sharded", "fetching", "resident", "reducing"];
  const BANDS = [
    { title: "phases", what: 0, colour: "phase" }, { title: "collectives", what: 1, colour: "collective" },
    { title: "copies", what: 2, colour: "copy" }, { title: "waits", what: 3, colour: "wait" }];
  const PHASES = ["between phases", "forward", "backward", "step"];
  const $ = (id) => document.getElementById(id);

  // ---- words ----

  function bytes(count) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let value = count, unit = 0;
    while (Math.abs(value) >= 1024 && unit + 1 < units.length) { value /= 1024; ++unit; }
    return (unit === 0 ? value : value.toFixed(unit === 3 ? 2 : 1)) + " " + units[unit];
  }
  function time(us) {
    const ms = us / 1000;
    return ms >= 10000 ? (ms / 1000).toFixed(1) + " s" : ms.toFixed(ms >= 10 ? 0 : ms >= 1 ? 1 : 2) + " ms";
  }
  const change = (from, to) => (to < from ? "−" : "+") + bytes(Math.abs(to - from));
  const words = (kind) => kind.replaceAll("_", " ");
  const few_of = (few, all, which) => few < all ? `The ${few} ${which} of ${all}` : "";

  // ---- elements ----

  function html(tag, text, attributes) {
    const element = document.createElement(tag);
    if (text !== undefined && text !== null) element.textContent = text;
    for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
    return element;
  }
  function svg(tag, attributes) {
    const element = document.createElementNS($("area").namespaceURI, tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  }
  function options(select, values, labels) {
    select.replaceChildren(...values.map((value, index) => html("option", labels[index], { value })));
    select.parentElement.hidden = values.length < 2;
  }
  function table(element, head, rows, caption) {
    const line = (cells, tag, row) => {
      const tr = html("tr", null, row && row.sum ? { class: "sum" } : {});
      cells.forEach((cell, index) => {
        const isText = typeof cell === "object" && cell !== null;
        const made = html(index === 0 || tag === "th" ? "th" : "td", isText ? cell.text : cell, isText ? { class: "text" } : {});
        if (made.tagName === "TH") made.scope = tag === "th" ? "col" : "row";
        tr.append(made);
      });
      return tr;
    };
    const thead = html("thead"), tbody = html("tbody");
    thead.append(line(head, "th"));
    rows.forEach((row) => tbody.append(line(row.cells || row, "td", row)));
    element.replaceChildren(html("caption", caption, { class: "words" }), thead, tbody);
  }

  // ---- data ----

  // Moments are differences, to be short in the file.
  function moments(account, kinds) {
    let at = 0;
    const held = kinds.map(() => 0);
    return account.moments.map((row) => {
      at += row[0];
      kinds.forEach((_, index) => { held[index] += row[2 + index]; });
      const by_kind = held.slice();
      return { at, phase: PHASES[row[1]], by_kind, total: by_kind.reduce((sum, value) => sum + value, 0) };
    });
  }
  function find_moment(list, at) {
    let low = 0, high = list.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (list[middle].at <= at) low = middle; else high = middle - 1;
    }
    return low;
  }

  const shown = { rank: null, step: null, account: null, list: [], index: 0, top: 1 };

  // ---- the area ----

  function path_of_band(list, lower, upper, x, y) {
    let up = "", down = "";
    list.forEach((moment, index) => {
      const from = x(moment.at), to = x(index + 1 < list.length ? list[index + 1].at : shown.step.duration);
      up += `L${from} ${y(upper[index])}L${to} ${y(upper[index])}`;
      down = `L${to} ${y(lower[index])}L${from} ${y(lower[index])}` + down;
    });
    return "M" + up.slice(1) + down + "Z";
  }
  function draw_area() {
    const list = shown.list, area = $("area");
    const theirs = other_step();
    const their_list = theirs ? moments(theirs.account, other.kinds) : [];
    shown.top = Math.max(1, ...list.map((moment) => moment.total), ...their_list.map((moment) => moment.total)) * 1.06;
    const x = (at) => +(at / Math.max(1, shown.step.duration) * WIDTH).toFixed(2);
    const y = (value) => +(HEIGHT - value / shown.top * HEIGHT).toFixed(2);
    area.replaceChildren();
    const axis = $("bytes-axis");
    axis.replaceChildren();
    for (let line = 0; line <= 4; ++line) {
      const value = shown.top * line / 4;
      area.append(svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y(value), y2: y(value) }));
      axis.append(html("span", bytes(Math.round(value)), { style: `top:${100 - line * 25}%` }));
    }
    let lower = list.map(() => 0);
    run.kinds.forEach((kind, index) => {
      const upper = list.map((moment, at) => lower[at] + moment.by_kind[index]);
      area.append(svg("path", { d: path_of_band(list, lower, upper, x, y), fill: `var(--k${kind % 10})` }));
      lower = upper;
    });
    if (theirs) {
      let line = "";
      their_list.forEach((moment, index) => {
        const to = index + 1 < their_list.length ? their_list[index + 1].at : theirs.duration;
        const scale = WIDTH / Math.max(1, theirs.duration);
        line += `L${(moment.at * scale).toFixed(2)} ${y(moment.total)}L${(to * scale).toFixed(2)} ${y(moment.total)}`;
      });
      area.append(svg("path", { class: "other-line", d: "M" + line.slice(1) }));
    }
    const peak = shown.account.peak;
    area.append(svg("line", { class: "cursor", id: "area-cursor", x1: 0, x2: 0, y1: 0, y2: HEIGHT }));
    // Above the cursor, which begins at the peak: it shows between the dashes.
    area.append(svg("line", { class: "peak-line", x1: x(peak.time), x2: x(peak.time), y1: 0, y2: HEIGHT }));
    $("area-words").textContent = `Bytes on the ${shown.account.name} of rank ${shown.rank.rank} over step ${shown.step.step}${shown.step.label ? " (" + shown.step.label + ")" : ""}, stacked by kind. ` +
      `The peak, ${bytes(peak.total)}, is at ${time(peak.time)} in its ${peak.phase === "other" ? "time between phases" : peak.phase} (dashed line).` +
      (theirs ? " The solid line is the other run's total, over its own step." : "");
    $("times").replaceChildren(...[0, 0.25, 0.5, 0.75, 1].map((part) => html("span", time(shown.step.duration * part))));
  }

  // ---- lanes ----

  function lane_row(title, tooltip, isBand) {
    const row = html("div", null, { class: isBand ? "lane band" : "lane" });
    row.append(html("span", title, { class: "label", title: tooltip }));
    const picture = svg("svg", { viewBox: `0 0 ${WIDTH} 16`, preserveAspectRatio: "none", "aria-hidden": "true" });
    const now = html("span", "", { class: "now" });
    row.append(picture, now);
    return { row, picture, now };
  }
  function rectangle(picture, begin, length, top, height, colour, words) {
    const scale = WIDTH / Math.max(1, shown.step.duration);
    const box = svg("rect", { x: (begin * scale).toFixed(2), width: Math.max(0.6, length * scale).toFixed(2), y: top, height, fill: `var(--${colour})` });
    const title = svg("title", {});
    title.textContent = words;
    box.append(title);
    picture.append(box);
  }
  function phases_of(step) {
    const spans = step.spans.filter((span) => span[0] === 0);
    // A step of an accumulator holds the optimizer's; backward is what the moments say.
    const result = spans.map((span) => ({ begin: span[1], length: span[2], words: span[3] }));
    let since = null, last = 0;
    const end = () => {
      if (since !== null) result.push({ begin: since, length: last - since, words: "backward" });
      since = null;
    };
    for (const moment of shown.list) {
      if (moment.phase === "backward") {
        if (since === null) since = moment.at;
        last = moment.at;
      } else if (moment.phase !== "between phases") {
        end();
      }
    }
    end();
    return result;
  }
  let lane_rows = [];
  function draw_lanes() {
    lane_rows = [];
    const step = shown.step;
    for (const band of BANDS) {
      const items = band.what === 0 ? phases_of(step)
        : step.spans.filter((span) => span[0] === band.what).map((span) => ({
          begin: span[1], length: span[2],
          words: [span[3] || "wait", span[4], span[5] ? bytes(span[5]) : ""].filter(Boolean).join(", ") }));
      if (items.length === 0) continue;
      const made = lane_row(band.title, band.title, true);
      const tints = { forward: "k6", backward: "k2", step: "k1" };
      items.forEach((item) => rectangle(made.picture, item.begin, item.length, 0, 16,
        band.what === 0 ? tints[item.words] || band.colour : band.colour, `${item.words}: ${time(item.length)} from ${time(item.begin)} on`));
      lane_rows.push({ ...made, state: (at) => {
        const here = items.filter((item) => item.begin <= at && at < item.begin + Math.max(1, item.length));
        return here.length === 0 ? "" : here.length === 1 ? here[0].words.split(",")[0] : here.length + " at once";
      } });
    }
    for (const lane of step.lanes) {
      const made = lane_row(lane.page, lane.page + (lane.bytes ? ", " + bytes(lane.bytes) + " when whole" : ""), false);
      lane.stretches.forEach(([state, begin, length]) => rectangle(made.picture, begin, length, state === 3 ? 10 : 0, state === 3 ? 6 : 16,
        STATES[state], `${lane.page} ${STATES[state]}: ${time(length)} from ${time(begin)} on`));
      lane_rows.push({ ...made, state: (at) => {
        const here = lane.stretches.filter(([, begin, length]) => begin <= at && at < begin + length).map(([state]) => STATES[state]);
        return here.length === 0 ? "sharded" : [...new Set(here)].join(", ");
      } });
    }
    lane_rows.forEach((lane) => {
      lane.cursor = svg("line", { class: "cursor", x1: 0, x2: 0, y1: 0, y2: 16 });
      lane.picture.append(lane.cursor);
    });
    $("lanes").replaceChildren(...lane_rows.map((lane) => lane.row));
    $("lane-legend").replaceChildren(...[["sharded", "only the shard is here"], ["fetching", "on its way"], ["resident", "whole here"],
      ["reducing", "its gradient travels"], ["collective", "a collective"], ["copy", "a copy to or from a tier"], ["wait", "the training thread waits"]]
      .map(([colour, meaning]) => {
        const item = html("li");
        item.append(html("i", null, { style: `background:var(--${colour})` }), html("span", `${colour}: ${meaning}`));
        return item;
      }));
  }

  // ---- the moment ----

  function show_moment(index) {
    shown.index = Math.min(Math.max(index, 0), shown.list.length - 1);
    const moment = shown.list[shown.index], peak = shown.account.peak;
    const x = moment.at / Math.max(1, shown.step.duration) * WIDTH;
    for (const cursor of [$("area-cursor"), ...lane_rows.map((lane) => lane.cursor)]) {
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
    }
    lane_rows.forEach((lane) => { lane.now.textContent = lane.state(moment.at); });
    const slider = $("moment");
    slider.value = moment.at;
    const text = `${time(moment.at)} of ${time(shown.step.duration)}, ${moment.phase}: ${bytes(moment.total)}` +
      (moment.total === peak.total ? ", the peak" : `, ${bytes(peak.total - moment.total)} below the peak`);
    slider.setAttribute("aria-valuetext", text);
    $("readout").textContent = text;
    $("legend").replaceChildren(...run.kinds.map((kind, at) => {
      const item = html("li");
      item.append(html("i", null, { style: `background:var(--k${kind % 10})` }), html("span", words(run.kind_names[kind])));
      const figure = html("span", bytes(moment.by_kind[at]), { class: "bytes" });
      figure.append(html("span", ` · ${bytes(peak.kinds[kind])} at the peak`, { class: "at-peak" }));
      item.append(figure);
      return item;
    }).reverse());
  }
  function go_to_time(at) {
    show_moment(find_moment(shown.list, at));
  }

  // ---- choices ----

  function other_step() {
    if (!other || other.ranks.length === 0) return null;
    const rank = other.ranks.find((one) => one.rank === shown.rank.rank) || other.ranks[0];
    const step = rank.steps.find((one) => one.step === shown.step.step) || rank.steps[rank.steps.length - 1];
    const account = step.accounts.find((one) => one.name === shown.account.name) || null;
    return account && { account, duration: step.duration };
  }
  // What was recorded and is not on the page.
  function left_out() {
    const rank = shown.rank, step = shown.step, said = [];
    const part = (shown_count, all, what) => { if (shown_count < all) said.push(what(shown_count, all)); };
    part(run.ranks.length, run.rank_count, (few, all) => `Of ${all} ranks it draws the ${few} with the highest peaks.`);
    part(rank.steps.length, rank.recorded, (few, all) => `Of ${all} recorded steps of rank ${rank.rank} (${rank.first} to ${rank.steps[rank.steps.length - 1].step}) ` +
      `it draws the last ${few}, from ${rank.steps[0].step} on.`);
    part(step.lanes.length, step.all_lanes, (few, all) => `Of ${all} pages of this step it has the first ${few}.`);
    part(step.spans.length, step.all_spans, (few, all) => `Of ${all} messages, copies and waits of this step it has the ${few} longest.`);
    return said.length === 0 ? "" : "This page is kept small. " + said.join(" ") + " zp report FILE.json -o NAME.trace.json has all of it, for Perfetto.";
  }
  function choose(rank, step, account) {
    shown.rank = run.ranks.find((one) => one.rank === rank) || run.ranks[0];
    const steps = shown.rank.steps;
    shown.step = steps.find((one) => one.step === step) || steps[steps.length - 1];
    const accounts = shown.step.accounts;
    shown.account = accounts.find((one) => one.name === account) || accounts[0];
    options($("rank"), run.ranks.map((one) => one.rank), run.ranks.map((one) => one.rank));
    options($("step"), steps.map((one) => one.step), steps.map((one) => one.label ? `${one.step}: ${one.label}` : one.step));
    options($("account"), accounts.map((one) => one.name), accounts.map((one) => one.name));
    $("rank").value = shown.rank.rank;
    $("step").value = shown.step.step;
    $("account").value = shown.account.name;
    shown.list = moments(shown.account, run.kinds);
    $("moment").max = Math.max(1, shown.step.duration);
    draw_area();
    draw_lanes();
    $("left-out").textContent = left_out();
    $("sentences").replaceChildren(...shown.step.sentences.map((sentence) => html("li", sentence)));
    table($("holders"), ["bytes", { text: "kind" }, { text: "allocated by" }, { text: "for page" }, "blocks"],
      shown.account.peak.holders.map(([kind, owner, page, count, blocks]) =>
        [bytes(count), { text: words(kind) }, { text: owner || "outside of operators" }, { text: page || "–" }, blocks]),
      few_of(shown.account.peak.holders.length, shown.account.peak.all_holders, "largest"));
    go_to_time(shown.account.peak.time);
  }

  // ---- what does not change ----

  function tile(figure, meaning) {
    const element = html("div", null, { class: "tile" });
    element.append(html("b", figure), html("span", meaning));
    return element;
  }
  function draw_head() {
    $("title").textContent = run.title;
    $("facts").replaceChildren(...run.facts.map(([what, value]) => {
      const line = html("div");
      line.append(html("dt", what), html("dd", value));
      return line;
    }));
    const highest = run.table.reduce((most, row) => row.total > most.total ? row : most, run.table[0]);
    const tiles = [tile(bytes(highest.total), `peak on the ${run.device}, rank ${highest.rank} in step ${highest.step}`),
      tile(time(highest.step_time), "mean of the recorded steps"),
      tile(time(highest.wait_time), `of them waiting (${(100 * highest.wait_time / Math.max(1, highest.step_time)).toFixed(0)} %)`),
      tile(run.rank_count, run.rank_count === 1 ? "rank" : "ranks")];
    $("tiles").replaceChildren(...tiles);
  }
  function draw_table() {
    const hasFormula = run.formula.length > 0;
    const head = ["kind", ...run.table.map((row) => `rank ${row.rank}, peak`), `rank ${run.table[0].rank}, held`];
    if (hasFormula) head.push("formula, held");
    const sum = (list) => list.reduce((total, value) => total + value, 0);
    const rows = run.kinds.map((kind) => {
      const cells = [words(run.kind_names[kind]), ...run.table.map((row) => bytes(row.peak[kind])), bytes(run.table[0].held[kind])];
      if (hasFormula) cells.push(run.formula[kind] ? bytes(run.formula[kind]) : "–");
      return { cells };
    });
    const totals = ["total", ...run.table.map((row) => bytes(row.total)), bytes(sum(run.table[0].held))];
    if (hasFormula) totals.push(bytes(sum(run.formula)));
    rows.push({ cells: totals, sum: true });
    table($("table"), head, rows, `Bytes on the ${run.device}: at each rank's peak; at the end of the last step` +
      (hasFormula ? "; and what lives from step to step by ZeRO's formula" : "") +
      (run.table.length < run.rank_count ? `. The first ${run.table.length} of ${run.rank_count} ranks` : ""));
  }
  function draw_steps() {
    if (run.by_step.length < 2) return;
    $("steps-section").hidden = false;
    const isLabelled = run.by_step.some((row) => row.label);
    table($("by-step"), ["step", ...(isLabelled ? [{ text: "what" }] : []), "peak", ...run.kinds.map((kind) => words(run.kind_names[kind])), { text: "the peak is in its" }, "time", "waiting"],
      run.by_step.map((row) => [row.step, ...(isLabelled ? [{ text: row.label }] : []), bytes(row.total), ...run.kinds.map((kind) => bytes(row.kinds[kind])),
        { text: row.phase }, time(row.time), time(row.wait)]), `Bytes on the ${run.device} of rank ${run.peak_rank} at the peak of each step` +
      (run.by_step.length < run.step_count ? `. The first ${run.by_step.length} of ${run.step_count} recorded steps` : ""));
  }
  function draw_growth() {
    $("growth").replaceChildren(...data.growth.map((sentence) => html("p", "Growth: " + sentence, { class: "warn" })));
    const few = few_of(data.growth.length, data.all_growths, "first");
    if (few) $("growth").append(html("p", few, { class: "words" }));
  }
  function draw_other() {
    if (!other || other.ranks.length === 0) return;
    $("comparison").hidden = false;
    const mine = run.table[0], theirs = other.table[0];
    $("other-words").textContent = `The other run is “${other.title}”. Rank ${theirs.rank}: its peak is ${bytes(theirs.total)} (${change(mine.total, theirs.total)}), ` +
      `its step takes ${time(theirs.step_time)} against ${time(mine.step_time)}, and waits ${time(theirs.wait_time)} against ${time(mine.wait_time)}.`;
    const names = [...new Set([...run.kinds.map((kind) => run.kind_names[kind]), ...other.kinds.map((kind) => other.kind_names[kind])])];
    const at = (one, list, kind) => list[one.kind_names.indexOf(kind)] || 0;
    table($("other-kinds"), ["kind", "peak", "other run's", "change", "held", "other run's", "change"],
      names.map((kind) => [words(kind), bytes(at(run, mine.peak, kind)), bytes(at(other, theirs.peak, kind)), change(at(run, mine.peak, kind), at(other, theirs.peak, kind)),
        bytes(at(run, mine.held, kind)), bytes(at(other, theirs.held, kind)), change(at(run, mine.held, kind), at(other, theirs.held, kind))]), "Bytes on the device that trains");
    table($("difference"), ["change", { text: "kind" }, { text: "allocated by" }, { text: "for page" }, "here", "other run"],
      data.difference.map(([kind, owner, page, here, there]) =>
        [change(here, there), { text: words(kind) }, { text: owner || "outside of operators" }, { text: page || "–" }, bytes(here), bytes(there)]),
      few_of(data.difference.length, data.all_differences, "largest"));
  }

  // ---- hands ----

  function key(event) {
    const far = Math.max(1, Math.round(shown.list.length / 20));
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageDown: far, PageUp: -far };
    if (event.key === "Home") show_moment(0);
    else if (event.key === "End") show_moment(shown.list.length - 1);
    else if (event.key === "p") go_to_time(shown.account.peak.time);
    else if (event.key in moves && (event.currentTarget.id !== "lanes" || event.key.startsWith("Arrow"))) show_moment(shown.index + moves[event.key]);
    else return;
    event.preventDefault();
  }
  function point(event) {
    const box = $("area").getBoundingClientRect();
    go_to_time((event.clientX - box.left) / box.width * shown.step.duration);
  }
  function listen() {
    $("rank").addEventListener("change", (event) => choose(+event.target.value, shown.step.step, shown.account.name));
    $("step").addEventListener("change", (event) => choose(shown.rank.rank, +event.target.value, shown.account.name));
    $("account").addEventListener("change", (event) => choose(shown.rank.rank, shown.step.step, event.target.value));
    $("to-peak").addEventListener("click", () => go_to_time(shown.account.peak.time));
    $("moment").addEventListener("input", (event) => go_to_time(+event.target.value));
    $("moment").addEventListener("keydown", key);
    $("lanes").addEventListener("keydown", key);
    $("area").addEventListener("pointermove", point);
    $("area").addEventListener("pointerdown", point);
  }

  draw_head();
  if (run.ranks.length === 0) {
    $("title").textContent += ": no step was recorded, since those that were chosen did not come";
    return;
  }
  $("main").hidden = false;
  draw_table();
  draw_steps();
  draw_growth();
  draw_other();
  listen();
  choose(run.peak_rank, run.peak_step, run.device);
  document.body.dataset.drawn = "yes";
})();
