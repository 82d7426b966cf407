// A study of `atomrl tune`: verdict, hyperparameter importance, history and slices, trials, final runs.
import { html, useEffect, useGet, useLive, useThrottled, number, duration, link, Failure, Loading, visible } from "./lib.js";
import { t } from "./i18n.js";

const WIDTH = 320;
const HEIGHT = 170;
const LEFT = 46;
const BOTTOM = 26;

/** Position of a value between minimum and maximum, from 0 to 1. */
function scale(values, log) {
  const of = log ? Math.log10 : (value) => value;
  const low = Math.min(...values.map(of));
  const span = Math.max(...values.map(of)) - low || 1;
  return (value) => (of(value) - low) / span;
}

const shown = (value) => (typeof value === "number" ? number(value) : typeof value === "string" ? value : JSON.stringify(value));

/** Mark of a trial; its shape shows the state. */
function Mark({ state, x, y, best }) {
  if (state === "pruned") return html`<path class="mark pruned" d=${`M${x - 4} ${y - 3}h8l-4 7z`} />`;
  if (state === "fail") return html`<path class="mark fail" d=${`M${x - 3.5} ${y - 3.5}l7 7m0 -7l-7 7`} />`;
  return html`<circle class=${`mark ${state} ${best ? "best" : ""}`} cx=${x} cy=${y} r=${best ? 5.5 : 4} />`;
}

/**
 * Scatter plot of trials: value over a key, or over the trial number.
 * @param {{title: string, trials: any[], of: (trial: any) => any, log?: boolean, choices?: any[], best: number | null, line?: boolean}} props
 */
function Scatter({ title, trials, of, log, choices, best, line }) {
  const given = trials.filter((trial) => trial.value !== null && of(trial) !== undefined);
  if (given.length < 2) return null;
  const places = choices ? choices.map((one) => JSON.stringify(one)) : null;
  const own = (trial) => (places ? places.indexOf(JSON.stringify(of(trial))) : of(trial));
  const across = places ? (value) => (value + 0.5) / places.length : scale(given.map(own), log);
  const up = scale(given.map((trial) => trial.value));
  const at = (trial) => [LEFT + 8 + (WIDTH - LEFT - 16) * across(own(trial)), 8 + (HEIGHT - BOTTOM - 16) * (1 - up(trial.value))];
  const values = given.map((trial) => trial.value);
  /** @type {[string, number, string][]} */
  const ends = places ? choices.map((one, i) => [shown(one), (i + 0.5) / places.length, "middle"]) : [[shown(Math.min(...given.map(own))), 0, "start"], [shown(Math.max(...given.map(own))), 1, "end"]];
  let highest = -Infinity;
  const path = given.filter((trial) => trial.state === "complete").map((trial) => {
    highest = Math.max(highest, trial.value);
    return at({ ...trial, value: highest }).map((one) => one.toFixed(1)).join(",");
  });
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const said = `${title}: ${t("trials_said", { n: given.length, low: number(low), high: number(high) })}`;
  return html`<figure class="chart"><figcaption><h3>${visible(title)}</h3></figcaption>
    <svg class="scatter" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${said}>
      <path class="axis" d=${`M${LEFT} 4V${HEIGHT - BOTTOM}H${WIDTH - 2}`} />
      ${[[high, 0], [low, 1]].map(([value, y]) => html`<text x=${LEFT - 5} y=${12 + y * (HEIGHT - BOTTOM - 16)} text-anchor="end">${number(value, number(low) === number(high) ? 5 : 3)}</text>`)}
      ${ends.map(([name, x, anchor]) => html`<text x=${LEFT + 8 + (WIDTH - LEFT - 16) * x} y=${HEIGHT - 8} text-anchor=${anchor}>${visible(name.length > 16 ? `${name.slice(0, 15)}…` : name)}</text>`)}
      ${line && path.length > 1 && html`<polyline class="best-line" points=${path.join(" ")} />`}
      ${given.map((trial) => {
        const [x, y] = at(trial);
        return html`<${Mark} state=${trial.state} x=${x} y=${y} best=${trial.number === best} />`;
      })}
    </svg></figure>`;
}

function Importance({ shares }) {
  const rows = Object.entries(shares);
  if (!rows.length) return html`<p class="faint">${t("too_few_trials")}</p>`;
  return html`<table class="bars"><tbody>${rows.map(([key, share]) => html`<tr><th scope="row"><code>${visible(key)}</code></th>
    <td><svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true"><rect width=${100 * share} height="10" /></svg></td><td class="number">${Math.round(100 * share)}%</td></tr>`)}</tbody></table>`;
}

function Finals({ study }) {
  if (!study.finals.length) return html`<p class="faint">${t("no_finals")}</p>`;
  const mean = (values) => (values.includes(null) ? null : values.reduce((sum, value) => sum + value, 0) / values.length);
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${t("finals")}><table>
    <thead><tr><th scope="col">${t("name")}</th>${study.seeds.map((seed) => html`<th scope="col">${t("seed")} ${seed}</th>`)}<th scope="col">${t("mean")}</th></tr></thead>
    <tbody>${study.finals.map((one) => html`<tr class=${one.name === study.winner ? "chosen" : ""}><th scope="row">${one.name === "as_it_is" ? t("as_it_is") : visible(one.name)}${one.name === study.winner ? " ★" : ""}</th>
      ${one.values.map((value, i) => html`<td>${one.runs[i] ? html`<a href=${link(["run", one.runs[i]])}>${number(value, 4)}</a>` : number(value, 4)}</td>`)}<td><strong>${number(mean(one.values), 4)}</strong></td></tr>`)}</tbody></table></div>`;
}

export function Study({ id }) {
  const [study, error, reload] = useGet(`/api/studies/${id}`);
  const soon = useThrottled(reload, 2000);
  useLive((name) => (name === "changed" || name === "ready") && soon());
  useEffect(() => {
    if (study) document.title = `${study.name} · AtomRL`;
  }, [study && study.name]);
  if (!study) return error ? html`<h1>${t("study")}</h1><${Failure} error=${error} />` : html`<${Loading} />`;
  const keys = Object.keys(study.space);
  const whole = study.trials.filter((trial) => trial.state === "complete");
  const best = whole.reduce((found, trial) => (found === null || trial.value > found.value ? trial : found), null);
  const count = (state) => study.trials.filter((trial) => trial.state === state).length;
  return html`<h1>${visible(study.name)}</h1>
    <p class="sub">${t("study_of", { metric: study.metric, n: study.window })}</p><${Failure} error=${error} />
    <section class=${`verdict ${study.better ? "good" : "warn"}`} aria-label=${t("verdict")}>
      <p class="first">${study.note ? visible(study.note) : t("study_runs")}</p>
      <p>${t("trials_counted", { n: study.trials.length, complete: count("complete"), pruned: count("pruned"), fail: count("fail"), running: count("running") })}
        ${best && html` ${t("best_trial", { n: best.number, value: number(best.value, 4) })}`}</p></section>
    <div class="two"><div><h2>${t("importance")}</h2><${Importance} shares=${study.importance} /></div>
      <div><h2>${t("finals")}</h2><${Finals} study=${study} /></div></div>
    <h2>${t("history_slices")}</h2>
    <p class="faint"><span aria-hidden="true">● </span>${t("complete")} <span aria-hidden="true">▼ </span>${t("pruned")} <span aria-hidden="true">✕ </span>${t("fail")} · ${t("largest_is_best")}</p>
    <div class="charts"><${Scatter} title=${t("history")} trials=${study.trials} of=${(trial) => trial.number} best=${best && best.number} line=${true} />
      ${keys.map((key) => html`<${Scatter} key=${key} title=${key} trials=${study.trials} of=${(trial) => trial.params[key]} log=${Boolean(study.space[key].log)}
        choices=${Array.isArray(study.space[key]) ? study.space[key] : null} best=${best && best.number} />`)}</div>
    <h2>${t("trials")}</h2>
    <div class="scroll" tabindex="0" role="region" aria-label=${t("trials")}><table>
      <thead><tr><th scope="col">${t("trial")}</th><th scope="col">${t("status")}</th><th scope="col">${t("value_of")}</th><th scope="col">${t("seconds")}</th>${keys.map((key) => html`<th scope="col"><code>${visible(key)}</code></th>`)}</tr></thead>
      <tbody>${study.trials.map((trial) => html`<tr class=${best && trial.number === best.number ? "chosen" : ""}><th scope="row">${trial.run ? html`<a href=${link(["run", trial.run])}>${trial.number}</a>` : trial.number}${best && trial.number === best.number ? " ★" : ""}</th>
        <td>${t(trial.state)}</td><td>${number(trial.value, 4)}</td><td class="nowrap">${duration(trial.seconds)}</td>
        ${keys.map((key) => html`<td>${key in trial.params ? visible(shown(trial.params[key])) : "–"}</td>`)}</tr>`)}</tbody></table></div>`;
}
