// Names of the doctor's rules, and their Chinese texts. The doctor's own sentences are English, as in the log.
import { html, visible } from "./lib.js";
import { t, inChinese } from "./i18n.js";

/** By rule: its name, what is wrong, what to try. @type {Record<string, [string, string, string]>} */
export const CHINESE = {
  skipped_updates: ["跳过的更新", "梯度不是有限数，这次更新被跳过。", "降低 train.learning_rate；设 model.dtype=float32；在 rollouts/ 中查找极端的奖励。"],
  replies_in_the_loss: ["环境回复进入损失", "环境写的 token 被当作模型写的来训练：模型会学着自己编写回复，不再提问。", "只有模型采样的内容才能是来源为 `model` 的片段（自己的引擎也一样）；其余位置 RowBatch.loss_mask 必须为 false。"],
  environment_failures: ["环境出错", "环境出错：这些回合没有奖励，被排除在外，实际批次比看起来小。", "查看 rollouts/ 中的 episode.message；它所请求的服务是否在运行、是否满足 environment.timeout_s？"],
  reward_failures: ["奖励缺失", "有的回答没有得到奖励：它们被排除在外，实际批次比看起来小。", "用 `atomrl reward 名称 rollouts/step_.../train.jsonl` 运行奖励函数以查看异常；让它为每条回答返回一个数。"],
  stale_weights: ["引擎权重过旧", "引擎与训练器的概率差起初很小，后来增大许多倍：引擎没有得到新的权重。", "换一个 rollout.engine（以 `hf` 为参照），判断是否为引擎的问题；自己的引擎：update_weights 是否复制了所有张量？"],
  rollout_gap: ["引擎与训练器不一致", "引擎与训练器对同样的 token 给出明显不同的概率，梯度因此是离策略的。", "设 model.dtype=float32；用 rollout.engine=hf 对照；rollout.top_p=1 且 rollout.top_k=0。"],
  learning_rate_too_high: ["学习率过高", "更新过大：奖励下降一半以上且策略性质改变，或一步之内策略移动过远。", "把 train.learning_rate 降到十分之一，加长 train.warmup_ratio，减小 train.max_grad_norm，或加 KL 惩罚（algorithm.kl.coefficient）。"],
  missing_stop_token: ["缺少停止 token", "几乎所有回答都写到长度上限，尽管之前已经结束：结束 token 不在停止采样的 token 之中。", "设 rollout.stop_token_ids=[ID]（或 rollout.stop=['文本']），并在模型的 generation_config.json 中设 eos_token_id；基础模型可先做几步 SFT。"],
  length_limit: ["长度上限", "许多回答在上限处被截断（或轮数用尽）：它们本可得到的奖励看不到。", "把 rollout.max_completion_tokens 加倍（多轮：environment.max_turns），或在提示中要求更短；如果文本已完整却继续写，见 missing_stop_token。"],
  pays_for_length: ["为长度付奖励", "同组中同样正确的回答，越长奖励越高；或奖励只取决于长度；或两者同升而准确率不变。", "去掉奖励对长度的依赖（reward.functions）；逐项比较 reward/NAME/mean。"],
  reward_without_accuracy: ["奖励升而准确率降", "奖励上升而准确率下降：得到奖励的并不是想要的（奖励作弊）。", "降低其他 reward.functions 的权重；按奖励排序 rollouts/，阅读得分最高的回答。"],
  no_updates: ["没有更新", "最近几步没有更新，或奖励不同而优势全为 0：权重没有变化。", "rollout.completions_per_prompt 至少为 2；选难度合适的题目（data.train）；rollout.temperature=1；检查 train.max_row_tokens。"],
  constant_reward: ["奖励恒定", "最近几步所有回答的奖励相同：优势全为 0，什么也学不到。", "检查奖励函数与标准答案；准确率接近 1 时换更难的题，接近 0 时换更容易的题；rollout.temperature=1。"],
  no_mixed_groups: ["没有混合组", "没有一组含有奖励不同的回答：组内相对优势全为 0。", "换更难或更容易的题目（data.train），增加 rollout.completions_per_prompt，或用 algorithm.name=dapo。"],
  repetition_is_paid: ["奖励重复的文字", "许多回答是同一段文字的重复，而得到的奖励不低于其他回答：模型学会了重复。", "让重复得不到奖励（在 reward.functions 中加 repetition_penalty，或只检查答案）；减小 rollout.max_completion_tokens；加 KL 惩罚（algorithm.kl.coefficient=0.01）。"],
  one_text_is_paid: ["所有题目同一回答也得奖励", "几乎所有回答都是同一段文字，与题目无关，却得到奖励。", "让奖励依赖题目（与 ground_truth 比较）；使用答案各不相同的数据（data.train）；加 KL 惩罚（algorithm.kl.coefficient=0.01）。"],
  echo_is_paid: ["照抄题目也得奖励", "许多回答照抄题目，而得到的奖励不低于其他回答：奖励在回答中读到的是题目。", "让奖励只读答案（题目里已有的内容不计分），并同时与 ground_truth 比较（reward.functions）。"],
  hedging_is_paid: ["罗列多个答案也得奖励", "许多回答列出多个答案，而得到的奖励不低于其他回答：奖励只看正确答案是否在其中。", "让奖励只取一个答案并完整比较（strict_math、exact_match、boxed），不要在文本中搜索标准答案（reward.functions）。"],
  empty_answer_is_paid: ["空答案也得奖励", "许多回答没有答案，而得到的奖励不低于其他回答：什么都不说最安全。", "没有答案或读不出答案时给 0（reward.functions；常见原因是 `except` 里的默认值）；对错误答案的惩罚不要大于正确答案的奖励。"],
  keyword_is_paid: ["一个词决定奖励", "组内的奖励几乎只取决于一个词，而得分最高的回答大多是错的。", "让奖励把答案与 ground_truth 比较（reward.functions）；若是评审模型或奖励模型，查看它单独给这个词多少分（`atomrl reward 名称 文件`）。"],
  wrong_answers_are_paid: ["错误答案同样得奖励", "与标准答案完全一致的回答得到的奖励不比其他回答多：奖励不看答案。", "在奖励中与 ground_truth 比较（reward.functions：strict_math、exact_match、boxed、gsm8k）；若本无对错，去掉这一列。"],
  pays_for_shortness: ["为简短付奖励", "奖励几乎只取决于简短，而多数答案是错的或无法判断；或回答变短而准确率随之下降。", "错误答案不收长度费用，减小该项权重（reward.functions），或用 length_penalty 的 free_tokens：低于它长度不收费。"],
  format_alone_is_paid: ["只有格式得分", "奖励因第一项之外的一项上升到满分，而准确率停在原处：只学会了格式。", "降低该项的权重（reward.functions），或只在答案正确时奖励格式；换更容易的题目，或先热身（SFT）。"],
  dead_reward_part: ["一项奖励始终为 0", "多个奖励函数之一长期对所有回答给 0，总奖励掩盖了这一点。", "用 `atomrl reward 名称 rollouts/step_.../train.jsonl` 判断是函数、标准答案还是模型的问题。"],
  invalid_actions: ["无效动作", "很大一部分回复在告诉模型它做错了（标签 `invalid`），而且没有减少：浪费轮次。", "先用正确的回合做 SFT；用停止串在动作结束处结束一轮（environment.stop）；奖励有效轮次，或对无效轮次收费。"],
  replies_die_out: ["某种回复消失", "一种曾经常见的回复几乎消失，而模型并未因此变好：它不再搜索，或不再调用工具。", "检查奖励中对每次回复的收费：只对正确答案收费，或设 algorithm.advantage.type=grpo_no_std；逐项比较 reward/NAME/mean，并阅读 rollouts/。"],
  entropy_collapse: ["熵崩溃", "熵降到开始时的十分之一，而仍有许多错误、多数组完全相同：策略在重复自己，不再探索。", "algorithm.clip.high=0.28，降低 train.learning_rate，rollout.temperature=1，或加 KL 惩罚（algorithm.kl.coefficient=0.001）。"],
  gradient_spikes: ["梯度尖峰", "梯度范数达到平常的十倍、最初几步最大值的三倍。一次会被裁剪，多次会毁掉所学。", "减小 train.max_grad_norm 或 train.learning_rate；查看这一步 rollouts/ 中异常的文本或奖励。"],
};

/** @param {string} id */
const chinese = (id) => (inChinese() && Object.hasOwn(CHINESE, id) ? CHINESE[id] : null);

/** Return true if the manual has a page on a finding; a run of another version may have other findings. @param {string} id */
export const hasPage = (id) => Object.hasOwn(CHINESE, id);

/** @param {string} id */
export function findingName(id) {
  return chinese(id)?.[0] ?? id.replaceAll("_", " ");
}

/** Text of a finding and its advice; in Chinese with the doctor's own sentences below, which have the numbers.
 *  @param {{found: {id: string, what: string, advice: string, quote?: string}}} props */
export function Said({ found }) {
  const words = chinese(found.id);
  const quote = found.quote ? html`<p><code>${visible(found.quote)}</code></p>` : "";
  if (!words) return html`<p>${visible(found.what)}</p>${quote}<p><strong>${t("try")}</strong> ${visible(found.advice)}</p>`;
  return html`<p>${words[1]}</p>${quote}<p><strong>${t("try")}</strong> ${words[2]}</p>
    <p lang="en"><small>${visible(found.what)} Try: ${visible(found.advice)}</small></p>`;
}
