// Completions: a list with filters, the group of one with its advantages, and one prompt over training.
import { html, useState, useEffect, useRef, useGet, useKeys, number, link, place, SortedBy, Explain, tint, Failure, Loading, visible } from "./lib.js";
import { t } from "./i18n.js";
import { Tokens } from "./tokens.js";
import { NARROW } from "./phone.js";

const PAGE = 50;
const FIELDS = ["first_step", "last_step", "split", "text", "min_reward", "max_reward", "min_length", "max_length", "finish_reason", "data_source", "mixed", "prompt", "sort", "descending", "offset"];
/** Filters that are shown on demand. */
const MORE = [...(NARROW.matches ? ["text", "min_reward", "max_reward"] : []), "split", "min_length", "max_length", "finish_reason", "data_source", "mixed"];
const SORTED = { step: "step", reward: "reward", advantage: "advantage", tokens: "length" };

const hintOf = (name) => (name === "reward" ? "reward_of_one_hint" : `col_${name}_hint`);

/** Return true if the address has no steps: the page then follows the newest step. */
const isNewest = (query) => !["first_step", "last_step", "step", "prompt"].some((name) => query.get(name));

function go(run, query, change, rest = []) {
  const next = new URLSearchParams(query);
  for (const [name, value] of Object.entries(change)) {
    if (value === null || value === "" || value === undefined) next.delete(name);
    else next.set(name, value);
  }
  if (!("offset" in change)) next.delete("offset");
  location.hash = link(["run", run.id, "rollouts", ...rest.map(String)], next).slice(1);
}

function Field({ name, query, change, type = "number", ...more }) {
  const [text, setText] = useState(query.get(name) || "");
  const timer = useRef(0);
  useEffect(() => setText(query.get(name) || ""), [query.get(name)]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const typed = (event) => {
    setText(event.target.value);
    clearTimeout(timer.current);
    const value = event.target.value;
    timer.current = setTimeout(() => change({ [name]: value }), 300);
  };
  return html`<label>${t(name)} <input type=${type} id=${`f-${name}`} step="any" value=${text} onInput=${typed} ...${more} /></label>`;
}

function Choice({ name, values, query, change, said = (value) => value }) {
  return html`<label>${t(name)} <select value=${query.get(name) || ""} onChange=${(event) => change({ [name]: event.target.value })}>
    <option value="">${t("any")}</option>${values.map((value) => html`<option value=${value}>${visible(said(value))}</option>`)}</select></label>`;
}

function Histogram({ title, bins }) {
  if (!bins.counts.length) return null;
  const top = Math.max(...bins.counts);
  const said = `${title}: ${number(bins.low)} – ${number(bins.high)}`;
  return html`<figure class="histogram"><svg viewBox="0 0 120 28" role="img" aria-label=${said} preserveAspectRatio="none">
    ${bins.counts.map((count, i) => html`<rect x=${i * 5} y=${28 - (27 * count) / top} width="4.4" height=${(27 * count) / top} />`)}</svg>
    <figcaption>${said}</figcaption></figure>`;
}

/** The current step, with buttons for the previous and the next. */
function Steps({ query, found, change }) {
  const [text, setText] = useState(null);
  const around = (found && found.around) || {};
  const [first, last] = found ? [found.first_step, found.last_step] : [null, null];
  const said = first === null && last === null ? "" : first === last ? String(first) : `${first ?? around.first}–${last ?? around.newest}`;
  const to = (step) => change({ first_step: step, last_step: step, step: null });
  const typed = (event) => {
    const match = event.target.value.trim().match(/^(\d+)(?:\s*[-–]\s*(\d+))?$/);
    setText(null);
    if (match) change({ first_step: match[1], last_step: match[2] || match[1], step: null });
  };
  const all = query.get("step") === "all" || (first === null && last === null && !isNewest(query));
  return html`<span class="steps-chosen" role="group" aria-label=${t("step")}>
    <button type="button" disabled=${around.previous === null || all} onClick=${() => to(around.previous)} aria-label=${t("previous_step")}>‹</button>
    <label>${t("step")} <input type="text" inputmode="numeric" id="f-step" size="5" value=${text ?? said} placeholder=${t("all_steps")} title=${t("step_hint")} onInput=${(event) => setText(event.target.value)} onChange=${typed} /></label>
    <button type="button" disabled=${around.next === null || all} onClick=${() => to(around.next)} aria-label=${t("next_step")}>›</button>
    <button type="button" aria-pressed=${isNewest(query)} onClick=${() => change({ first_step: null, last_step: null, step: null })}>${t("newest")}</button>
    <button type="button" aria-pressed=${all} onClick=${() => change({ first_step: null, last_step: null, step: "all" })}>${t("all_steps")}</button></span>`;
}

function Filters({ run, query, found, change }) {
  const active = MORE.filter((name) => query.get(name) && (NARROW.matches || name !== "finish_reason" || query.get(name) !== "length"));
  const [more, setMore] = useState(active.length > 0);
  useKeys({ "/": () => document.getElementById("f-text") && document.getElementById("f-text").focus() });
  return html`<form class=${`filters ${more ? "" : "folded"}`} onSubmit=${(event) => event.preventDefault()}>
    <div class="bar"><${Steps} query=${query} found=${found} change=${change} />
      <${Field} name="text" type="search" query=${query} change=${change} placeholder=${t("text_hint")} />
      <span class="range" role="group" aria-label=${t("reward")}><${Field} name="min_reward" query=${query} change=${change} /><${Field} name="max_reward" query=${query} change=${change} /></span>
      <label title=${t("cut_hint")}><input type="checkbox" checked=${query.get("finish_reason") === "length"} onChange=${(event) => change({ finish_reason: event.target.checked ? "length" : null })} /> ${t("truncated")}</label>
      <button type="button" aria-expanded=${more} onClick=${() => setMore(!more)}>${t("more_filters")}${active.length ? ` (${active.length})` : ""}</button>
      ${[...query.keys()].length > 0 && html`<button type="button" class="quiet" onClick=${() => (location.hash = link(["run", run.id, "rollouts"]).slice(1))}>${t("reset")}</button>`}</div>
    ${more && html`<div class="bar more">
      <${Choice} name="split" values=${found ? found.splits : []} query=${query} change=${change} said=${(value) => t(`split_${value}`)} />
      <${Field} name="min_length" query=${query} change=${change} min="0" /><${Field} name="max_length" query=${query} change=${change} min="0" />
      <${Choice} name="finish_reason" values=${found ? found.finish_reasons : []} query=${query} change=${change} />
      ${found && found.sources.length > 1 && html`<${Choice} name="data_source" values=${found.sources} query=${query} change=${change} />`}
      <label title=${t("mixed_hint")}><input type="checkbox" checked=${query.get("mixed") === "true"} onChange=${(event) => change({ mixed: event.target.checked ? "true" : null })} /> ${t("mixed")}</label></div>`}
    ${query.get("prompt") && html`<p>${t("one_prompt_only")} <button type="button" class="small" onClick=${() => change({ prompt: null })}>${t("all_prompts")}</button></p>`}
  </form>`;
}

export function Rollouts({ run, rest, query }) {
  if (rest[0] === "prompt") return html`<${PromptHistory} run=${run} prompt=${rest[1]} split=${query.get("split")} />`;
  const asked = new URLSearchParams();
  for (const name of FIELDS) if (query.get(name)) asked.set(name, query.get(name));
  if (isNewest(query)) asked.set("newest", "true");
  asked.set("limit", String(PAGE));
  const [found, error, , fresh] = useGet(`/api/runs/${run.id}/rollouts?${asked}`, [run.id]);
  // Based on the address at that time, which may have text that was typed just before and is not rendered yet.
  const change = (values) => {
    const now = place();
    go(run, now.query, values, now.path.slice(3));
  };
  const rows = found ? found.rows : [];
  const at = rest.length === 3 ? rows.findIndex((row) => String(row.step) === rest[0] && row.split === rest[1] && String(row.place) === rest[2]) : -1;
  const open = (index) => {
    const row = rows[index];
    if (row) go(run, query, { offset: query.get("offset") }, [row.step, row.split, row.place]);
  };
  useKeys({ j: () => open(Math.min(rows.length - 1, at + 1)), k: () => open(Math.max(0, at - 1)) });
  const offset = Number(query.get("offset") || 0);
  const scale = Math.max(1e-9, ...rows.map((row) => Math.abs(row.advantage || 0)));
  const [sort, descending] = [query.get("sort") || "step", query.get("descending") === "true"];
  /** Return true if the row above belongs to the same group. */
  const again = (i) => i > 0 && ["step", "split", "prompt_hash"].every((name) => rows[i][name] === rows[i - 1][name]);
  const sortBy = (name) => change({ sort: name, descending: sort === name && descending ? null : "true" });
  if (found && found.of === 0) return html`<p class="empty">${t(run.loss ? "no_rollouts_ever" : "no_rollouts")}</p>`;
  return html`
    <${Filters} run=${run} query=${query} found=${found} change=${change} />
    <${Failure} error=${error} />
    ${!found ? !error && html`<${Loading} />` : html`
    <div class=${`bar ${fresh ? "" : "old"}`}><span role="status">${t("rollouts_found", { n: found.total.toLocaleString(), of: found.of.toLocaleString() })}</span>
      <${Histogram} title=${t("reward")} bins=${found.rewards} /><${Histogram} title=${t("length_tokens")} bins=${found.lengths} />
      <span class="pager"><button disabled=${offset === 0} onClick=${() => change({ offset: Math.max(0, offset - PAGE) })}>${t("before")}</button>
      ${found.total > 0 && html` ${offset + 1}–${Math.min(found.total, offset + PAGE)} `}
      <button disabled=${offset + PAGE >= found.total} onClick=${() => change({ offset: offset + PAGE })}>${t("next")}</button></span></div>
    ${rest.length !== 3 && html`<p class="faint">${t("rollouts_hint")}</p>
      <${Explain} terms=${[...["step", "reward", "advantage", "tokens", "finish"].map((name) => [t(name), t(hintOf(name))]), [t("mixed"), t("mixed_hint")]]} />`}
    <div class=${rest.length === 3 ? "split" : ""}>
      ${found.total === 0 ? html`<p class="empty">${t("nothing_found")}</p>` : html`
      <div class="scroll list" tabindex="0" role="region" aria-label=${t("rollouts")}><table class="rollouts">
        <thead><tr>${["step", "prompt", "completion", "reward", "advantage", "tokens", "finish"].map((name) => (SORTED[name]
          ? html`<${SortedBy} key=${name} name=${name} kind=${name === "step" ? "" : "number"} title=${t(hintOf(name))} direction=${sort === SORTED[name] ? (descending ? "descending" : "ascending") : null} sort=${() => sortBy(SORTED[name])} />`
          : html`<th scope="col" title=${t(hintOf(name))}>${t(name)}</th>`))}</tr></thead>
        <tbody>${rows.map((row, i) => html`<tr key=${`${row.step}${row.split}${row.place}`} class=${`${i === at ? "chosen" : ""} ${again(i) ? "again" : ""}`} onClick=${() => open(i)}>
          <td class="nowrap"><a href=${link(["run", run.id, "rollouts", String(row.step), row.split, String(row.place)], query)} aria-current=${i === at ? "true" : undefined} onClick=${(event) => event.stopPropagation()}>${row.step}</a>${row.split === "eval" && html` <small>${t("eval")}</small>`}</td>
          <td class="text prompt">${visible(row.prompt)}</td><td class="text">${visible(row.completion)}</td>
          <td class="number">${number(row.reward)}</td><td class=${`number ${tint(row.advantage, scale)}`}>${number(row.advantage)}</td>
          <td class="number">${number(row.tokens)}</td><td class=${row.finish === "length" ? "warning" : ""}>${row.finish === "length" ? t("cut") : visible(row.finish || "")}</td></tr>`)}</tbody>
      </table></div>`}
      ${rest.length === 3 && html`<${Group} run=${run} rest=${rest} query=${query} />`}
    </div>`}`;
}

const FORMULAS = {
  z: (r, m, s) => `(${number(r)} − ${number(m)}) / ${number(s)} = ${number((r - m) / (s + 1e-6))}`,
  centred: (r, m) => `${number(r)} − ${number(m)} = ${number(r - m)}`,
  others: (r, m, s, n) => `${number(r)} − ${number((m * n - r) / (n - 1))} = ${number(((r - m) * n) / (n - 1))}`,
  reward: (r) => number(r),
};

/** The recomputed advantage of a completion. */
function computedMath(reward, { baseline, scale }, advantage) {
  if (scale === undefined) return number(advantage);
  const above = Math.abs(baseline) < 1e-6 ? number(reward) : `${number(reward)} − ${number(baseline)}`;
  if (Math.abs(scale - 1) < 1e-4) return `${above} = ${number(advantage)}`;
  return `(${above}) / ${number(scale)} = ${number(advantage)}`;
}

function Group({ run, rest, query }) {
  const [step, split, place] = rest;
  const path = `/api/runs/${run.id}/rollouts/${step}/${split}/${place}`;
  const [found, error, , fresh] = useGet(path, []);
  const [told, , , freshlyTold] = useGet(split === "train" ? `${path}/advantages` : null, []);
  const box = useRef(null);
  const steps = found ? found.steps_of_prompt : [];
  const here = steps.findIndex(([one]) => one === Number(step));
  const move = (by) => {
    const next = steps[here + by];
    if (next === undefined) return;
    go(run, query, { offset: query.get("offset") }, [next[0], split, next[1]]);
  };
  useKeys({ "[": () => move(-1), "]": () => move(1), Escape: () => go(run, query, { offset: query.get("offset") }) });
  if (!found || !fresh) return html`<aside class="group">${error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}</aside>`;
  const { mean, std, formula } = found.arithmetic;
  const again = freshlyTold && told ? told : {};
  const trained = found.members.filter((member) => member.advantage !== null);
  const rewards = found.members.map((member) => member.reward).filter((reward) => reward !== null);
  const nothing = std === 0 && rewards.length > 1 && !(again.computed || []).some((advantage) => Math.abs(advantage) > 1e-6);
  const mathOf = (member) => {
    if (split === "eval" || member.reward === null) return null;
    if (formula) return FORMULAS[formula](member.reward, mean, std, rewards.length);
    return again.computed && member.advantage !== null ? computedMath(member.reward, again, again.computed[trained.indexOf(member)]) : null;
  };
  const scale = Math.max(1e-9, ...found.members.map((member) => Math.abs(member.advantage || 0)));
  return html`<aside class="group" ref=${box} aria-label=${t("group")}>
    <div class="bar"><h2>${t("group")} <small>${t("step_no", { n: step })}${found.data_source ? html` · ${visible(found.data_source)}` : ""}</small></h2>
      <button onClick=${() => go(run, query, { offset: query.get("offset") })}>${t("close")}</button></div>
    <h3>${t("prompt")}</h3><${Pictures} run=${run} names=${found.images} /><pre class="text page" tabindex="0">${visible(found.prompt)}</pre>
    ${found.ground_truth !== null && found.ground_truth !== undefined && html`<p>${t("ground_truth")}: <code>${visible(typeof found.ground_truth === "string" ? found.ground_truth : JSON.stringify(found.ground_truth))}</code></p>`}
    <p><a href=${link(["run", run.id, "rollouts", "prompt", found.prompt_hash], new URLSearchParams({ split }))}>${t("through_run", { n: steps.length })}</a></p>
    <h3>${t("arithmetic")}</h3>
    ${mean === null ? html`<p>${t("no_rewards")}</p>` : html`<p class="math">${t("mean")} = (${rewards.map((reward) => number(reward)).join(" + ")}) / ${rewards.length} = <strong>${number(mean)}</strong><br />
      ${t("deviation")} = <strong>${number(std)}</strong></p>
      <p>${split === "eval" ? t("not_trained") : nothing ? t("no_signal") : formula ? t(`formula_${formula}`) : again.computed ? t("formula_computed") : t("formula_other")}
        ${!formula && again.why && html` ${visible(again.why)}.`}</p>
      ${again.equation && html`<pre class="text math" tabindex="0" aria-label=${t("equation")}>${visible(again.equation)}</pre>`}
      ${!formula && again.scale !== undefined && html`<p class="math">${t("baseline_scale", { baseline: number(again.baseline), scale: number(again.scale) })}</p>`}`}
    <ol class="members">${found.members.map((member) => html`<${Member} key=${member.place} run=${run} member=${member} step=${step} split=${split} chosen=${String(member.place) === place}
      math=${mathOf(member)} scale=${scale} />`)}</ol>
  </aside>`;
}

/** The pictures of a prompt or a reply, in the order of its <image>. */
function Pictures({ run, names }) {
  if (!names || !names.length) return null;
  return html`<p class="pictures">${names.map((name, i) => html`<a href=${`/api/runs/${run.id}/images/${name}`} target="_blank" rel="noreferrer"><img src=${`/api/runs/${run.id}/images/${name}`} alt=${t("picture_n", { n: i + 1 })} title=${name} loading="lazy" /></a>`)}</p>`;
}

function Member({ run, member, step, split, chosen, math, scale }) {
  const [shown, setShown] = useState(false);
  const parts = Object.entries(member.reward_parts);
  const failures = Object.entries(member.reward_failures);
  return html`<li class=${chosen ? "chosen" : ""}>
    <p class="bar"><strong>${t("reward")} ${number(member.reward)}</strong>
      ${member.advantage !== null && html`<span class=${tint(member.advantage, scale)}>A ${member.advantage > 0 ? "▲" : member.advantage < 0 ? "▼" : "="} ${number(member.advantage)}</span>`}
      <span>${t("n_tokens", { n: member.tokens ?? "?" })}</span>
      ${member.finish === "length" ? html`<span class="warning">! ${t("cut")}</span>` : html`<span class="faint">${visible(member.finish || "")}</span>`}
      ${parts.length > 1 && html`<span class="faint">${visible(parts.map(([name, value]) => `${name} ${number(value)}`).join(", "))}</span>`}
      <button class="small" aria-expanded=${shown} onClick=${() => setShown(!shown)}>${t("tokens")}</button></p>
    ${math && html`<p class="math">A = ${math}</p>`}
    ${failures.map(([name, said]) => html`<p class="error">${visible(name)}: ${visible(said)}</p>`)}
    ${shown ? html`<${Tokens} run=${run} step=${step} split=${split} place=${member.place} text=${member.completion} />` : html`<pre class="text" tabindex="0">${visible(member.completion)}</pre>`}
    ${member.episode && html`<${Episode} run=${run} episode=${member.episode} />`}
  </li>`;
}

function Episode({ run, episode }) {
  const turns = episode.turns || [];
  /** The turn (from 1) at which this one was dropped from the model's context; null if it never was. */
  const droppedBy = turns.map((_, i) => turns.findIndex((turn, later) => later > i && (turn.sees_from || 0) > i) + 1 || null);
  const dropped = droppedBy.filter(Boolean).length;
  return html`<details><summary>${t("turns", { n: turns.length })}${dropped > 0 && html` <span class="warning">! ${t("n_dropped", { n: dropped })}</span>`}</summary>
    ${episode.opening && html`<pre class="text reply" tabindex="0" aria-label=${t("prompt")}>${visible(episode.opening)}</pre>`}
    <${Pictures} run=${run} names=${episode.opening_images} />
    ${turns.map((turn, i) => html`${droppedBy[i] && html`<p class="warning"><span aria-hidden="true">✂ </span>${t("dropped_by", { turn: i + 1, by: droppedBy[i] })}</p>`}<pre class=${`text ${droppedBy[i] ? "dropped" : ""}`} tabindex="0" aria-label=${t("completion")}>${visible(turn.text ?? "")}</pre>
      ${(turn.reply || turn.labels?.length > 0 || typeof turn.reward === "number") && html`<p class="faint">${visible((turn.labels ?? []).filter(Boolean).join(", "))} ${number(turn.seconds)} s${typeof turn.reward === "number" && html` · ${t("reward")} ${number(turn.reward)}`}</p><pre class="text reply" tabindex="0" aria-label=${t("reply")}>${visible(turn.reply ?? "")}</pre><${Pictures} run=${run} names=${turn.images} />`}`)}
    <p>${t("ended")}: ${visible(episode.ended ?? "")} ${visible(episode.message ?? "")}</p></details>`;
}

function PromptHistory({ run, prompt, split }) {
  const query = split ? `?split=${encodeURIComponent(split)}` : "";
  const [found, error] = useGet(`/api/runs/${run.id}/prompts/${encodeURIComponent(prompt)}${query}`, [run.id]);
  if (!found) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  return html`<p><a href=${link(["run", run.id, "rollouts"])}>← ${t("rollouts")}</a></p>
    <h2>${t("prompt_through")}</h2><${Pictures} run=${run} names=${found.images} /><pre class="text page" tabindex="0">${visible(found.prompt)}</pre>
    <p>${t("ground_truth")}: <code>${visible(String(found.ground_truth ?? "–"))}</code></p>
    <ol class="history">${found.steps.map((row) => {
      const given = row.members.map((member) => member.reward).filter((reward) => reward !== null);
      const mean = given.length ? given.reduce((sum, value) => sum + value, 0) / given.length : null;
      return html`<li><h3><a href=${link(["run", run.id, "rollouts", String(row.step), row.split, String(row.members[0].place)])}>${t("step_no", { n: row.step })}</a>${row.split === "eval" && html` ${t("eval")}`} <small>${t("mean_reward", { value: number(mean) })} · ${t("n_completions", { n: row.members.length })}</small></h3>
        <p class="marks" aria-hidden="true">${row.members.map((member) => html`<span class=${tint(member.reward === null ? null : member.reward - 0.5, 0.5)}>${number(member.reward)}</span>`)}</p>
        ${row.members.map((member) => html`<pre class="text" tabindex="0" aria-label=${t("completion")}>${number(member.reward)}  ${visible(member.completion)}</pre>`)}</li>`;
    })}</ol>`;
}
