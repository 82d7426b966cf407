// Names of the doctor's rules and their Chinese texts. The doctor itself writes English, as in the log.
import { html, visible } from "./lib.js";
import { t, inChinese } from "./i18n.js";

/** Rule id -> name, problem, advice. @type {Record<string, [string, string, string]>} */
export const CHINESE = {
  skipped_updates: ["跳过的更新", "梯度出现 NaN 或 Inf，这次更新被跳过。", "降低 train.learning_rate；设 model.dtype=float32；在 rollouts/ 中查找极端的奖励。"],
  replies_in_the_loss: ["环境回复计入损失", "环境写的 token 被当作模型输出来训练：模型会学着自己编造环境回复，而不再去询问。", "只有模型采样的片段，来源才能是 `model`（自定义引擎同理）；其余位置的 RowBatch.loss_mask 必须为 false。"],
  environment_failures: ["环境出错", "环境出错：这些回合没有奖励，被排除在训练之外，实际批次比配置的小。", "查看 rollouts/ 中的 episode.message；确认所调用的服务在运行，并能在 environment.timeout_s 内响应。"],
  reward_failures: ["奖励缺失", "部分回答没有得到奖励：它们被排除在训练之外，实际批次比配置的小。", "用 `atomrl reward 名称 rollouts/step_.../train.jsonl` 运行奖励函数，查看异常；函数必须为每条回答返回一个数。"],
  stale_weights: ["引擎权重过旧", "引擎与训练器的概率差起初很小，后来增大许多倍：引擎没有收到新权重。", "换一个 rollout.engine（以 `hf` 为参照），判断是否为引擎的问题；若是自定义引擎，检查 update_weights 是否复制了所有张量。"],
  rollout_gap: ["引擎与训练器不一致", "引擎与训练器对同样的 token 给出明显不同的概率，梯度因此是 off-policy 的。", "设 model.dtype=float32；用 rollout.engine=hf 对照；rollout.top_p=1 且 rollout.top_k=0。"],
  learning_rate_too_high: ["学习率过高", "更新过大：奖励下降一半以上且策略性质改变，或单步内策略变化过大。", "把 train.learning_rate 降到十分之一，增大 train.warmup_ratio，减小 train.max_grad_norm，或加 KL 惩罚（algorithm.kl.coefficient）。"],
  missing_stop_token: ["缺少停止 token", "几乎所有回答都写到长度上限，尽管内容早已结束：结束 token 不在停止 token 之列。", "设 rollout.stop_token_ids=[ID]（或 rollout.stop=['文本']），并在模型的 generation_config.json 中设 eos_token_id；基础模型可先做几步 SFT。"],
  length_limit: ["长度上限", "许多回答在上限处被截断（或轮数用尽），完整回答本可得到的奖励因此丢失。", "把 rollout.max_completion_tokens 加倍（多轮：environment.max_turns），或在提示词中要求更短的回答；如果内容已完整却仍继续写，见 missing_stop_token。"],
  pays_for_length: ["奖励偏向长回答", "同组中同样正确的回答，越长奖励越高；或奖励只取决于长度；或两者同升而准确率不变。", "去掉奖励对长度的依赖（reward.functions）；逐项比较 reward/NAME/mean。"],
  reward_without_accuracy: ["奖励升而准确率降", "奖励上升而准确率下降：奖励鼓励的并不是想要的行为（reward hacking）。", "降低其他 reward.functions 的权重；按奖励排序 rollouts/，阅读得分最高的回答。"],
  no_updates: ["没有更新", "最近几步没有更新，或奖励不同而优势全为 0：权重没有变化。", "rollout.completions_per_prompt 至少为 2；选难度合适的题目（data.train）；rollout.temperature=1；检查 train.max_row_tokens。"],
  constant_reward: ["奖励恒定", "最近几步所有回答的奖励相同：优势全为 0，没有学习信号。", "检查奖励函数与标准答案；准确率接近 1 时换更难的题，接近 0 时换更容易的题；rollout.temperature=1。"],
  no_mixed_groups: ["没有混合组", "每组内的奖励都相同：组内相对优势全为 0。", "换更难或更容易的题目（data.train），增加 rollout.completions_per_prompt，或用 algorithm.name=dapo。"],
  repetition_is_paid: ["重复文本也得奖励", "许多回答是同一段文字的重复，而得到的奖励不低于其他回答：模型学会了重复。", "不给重复文本奖励（在 reward.functions 中加 repetition_penalty，或只检查答案）；减小 rollout.max_completion_tokens；加 KL 惩罚（algorithm.kl.coefficient=0.01）。"],
  one_text_is_paid: ["所有题目同一回答也得奖励", "几乎所有回答都是同一段文字，与题目无关，却得到奖励。", "让奖励依赖题目（与 ground_truth 比较）；使用答案各不相同的数据（data.train）；加 KL 惩罚（algorithm.kl.coefficient=0.01）。"],
  echo_is_paid: ["照抄题目也得奖励", "许多回答照抄题目，而得到的奖励不低于其他回答：奖励函数读到的是回答中的题目。", "让奖励只读答案（题目里已有的内容不计分），并同时与 ground_truth 比较（reward.functions）。"],
  hedging_is_paid: ["罗列多个答案也得奖励", "许多回答列出多个答案，而得到的奖励不低于其他回答：奖励函数只看正确答案是否在其中。", "让奖励只取一个答案并完整比较（strict_math、exact_match、boxed），不要在文本中搜索标准答案（reward.functions）。"],
  empty_answer_is_paid: ["空答案也得奖励", "许多回答没有答案，而得到的奖励不低于其他回答：不作答最安全。", "没有答案或解析失败时给 0（reward.functions；常见原因是 `except` 里的默认值）；对错误答案的惩罚不要大于正确答案的奖励。"],
  keyword_is_paid: ["一个词决定奖励", "组内的奖励几乎只取决于一个词，而得分最高的回答大多是错的。", "让奖励把答案与 ground_truth 比较（reward.functions）；若是 LLM 裁判或奖励模型，单独给这个词打分看看（`atomrl reward 名称 文件`）。"],
  wrong_answers_are_paid: ["错误答案同样得奖励", "与标准答案完全一致的回答得到的奖励不比其他回答多：奖励不看答案。", "在奖励中与 ground_truth 比较（reward.functions：strict_math、exact_match、boxed、gsm8k）；若本无对错，去掉这一列。"],
  pays_for_shortness: ["奖励偏向短回答", "奖励几乎只取决于回答是否简短，而多数答案是错的或无法判断；或回答变短而准确率随之下降。", "不对错误答案施加长度惩罚，减小该项权重（reward.functions），或设 length_penalty 的 free_tokens：低于该长度不惩罚。"],
  format_alone_is_paid: ["只靠格式得分", "奖励因第一项之外的一项上升到满分，而准确率没有变化：模型只学会了格式。", "降低该项的权重（reward.functions），或只在答案正确时奖励格式；换更容易的题目，或先做 SFT。"],
  dead_reward_part: ["一项奖励始终为 0", "多个奖励函数之一长期对所有回答给 0，总奖励掩盖了这一点。", "用 `atomrl reward 名称 rollouts/step_.../train.jsonl` 判断是函数、标准答案还是模型的问题。"],
  invalid_actions: ["无效动作", "很大一部分环境回复提示动作无效（标签 `invalid`），而且没有减少：浪费轮次。", "先用正确的回合做 SFT；用停止字符串在动作结束处结束一轮（environment.stop）；奖励有效轮次，或惩罚无效轮次。"],
  replies_die_out: ["某种回复消失", "一种曾经常见的环境回复几乎消失，而模型并未因此变好：例如不再搜索，或不再调用工具。", "检查奖励中对每次回复的惩罚：只对正确答案施加，或设 algorithm.advantage.type=grpo_no_std；逐项比较 reward/NAME/mean，并阅读 rollouts/。"],
  entropy_collapse: ["熵崩溃", "熵降到开始时的十分之一，而仍有许多错误、多数组完全相同：策略不再探索。", "algorithm.clip.high=0.28，降低 train.learning_rate，rollout.temperature=1，或加 KL 惩罚（algorithm.kl.coefficient=0.001）。"],
  gradient_spikes: ["梯度尖峰", "梯度范数达到平常的十倍、最初几步最大值的三倍。偶尔一次会被裁剪，多次则会破坏已学到的内容。", "减小 train.max_grad_norm 或 train.learning_rate；查看这一步 rollouts/ 中异常的文本或奖励。"],
  learns_nothing: ["没有学到东西", "至少 20 步以来准确率（没有准确率时为奖励）没有上升，而且很低：奖励有差异，权重也在更新，但策略没有变好。", "把 train.learning_rate 提高到三倍；增大 rollout.completions_per_prompt；换更容易的题目（data.train），或先做 SFT；阅读 rollouts/，看什么得到了奖励。如果这些步只是整个训练的一小部分，请继续等待。"],
};

/** @param {string} id */
const chinese = (id) => (inChinese() && Object.hasOwn(CHINESE, id) ? CHINESE[id] : null);

/** Return true if the docs have a page on a finding; runs of other versions may have other findings. @param {string} id */
export const hasPage = (id) => Object.hasOwn(CHINESE, id);

/** @param {string} id */
export function findingName(id) {
  return chinese(id)?.[0] ?? id.replaceAll("_", " ");
}

/** Text of a finding and its advice. In Chinese, the doctor's English text with the numbers follows.
 *  @param {{found: {id: string, what: string, advice: string, quote?: string}}} props */
export function Said({ found }) {
  const words = chinese(found.id);
  const quote = found.quote ? html`<p><code>${visible(found.quote)}</code></p>` : "";
  if (!words) return html`<p>${visible(found.what)}</p>${quote}<p><strong>${t("try")}</strong> ${visible(found.advice)}</p>`;
  return html`<p>${words[1]}</p>${quote}<p><strong>${t("try")}</strong> ${words[2]}</p>
    <p lang="en"><small>${visible(found.what)} Try: ${visible(found.advice)}</small></p>`;
}
