# ruff: noqa: E501
"""Changes of descriptions that turn no check red, with the reason: of each, the model types in which it survives."""

from collections.abc import Mapping

NO_GROUPS = "as many kv heads as query heads: the copies for queries are the heads themselves"
NO_ROTARY = "no column rotates, so there are no pairs"
SELF_DUAL = "permutations, signs and rotations are their own duals"
NO_SCALES = "a permutation has no scale or sign to leave out"
NO_MEAN = "only a stream that LayerNorms read has a mean that nobody sees"
SIDES = "what one side gives the other takes: both name the same free vectors"
ONE_ROW = "the tensor is one vector of the stream"
TIED = "tied, nothing behind the last norm is free: it is enough that the tensor has a second role"
TIED_RMS = "behind RMSNorm the stream of a tied model has signed permutations and no free mean: the role adds nothing"
TIED_NORM = "the head behind this norm is tied, so its gain is permuted and no more, whatever else is said of it"
FIXED = "all states of this model are outputs, so its stream does not move"
UNREAD = "nothing reads the last norm of a bare model, and its stream does not move"
OPTIONAL = "every file here has it, or none has"
BEHIND = "a norm that writes to the stream: its gain is permuted and no more, whatever else is said of it"
PLAIN = "norms without parameters are all alike, and have none that could be folded or exposed"
TRADE = "one gain takes what the other gives, in whichever order they are named"
DUAL_HEADS = (
    "without biases queries may move by an element and keys by its dual, or the other way round: the same group"
)
WHOLE = "a tied embedding moves as a whole, and its rows are not asked for"
UNUSED = "a head that the class does not run and hub folders carry: no output depends on it"
NO_SHIFT = "an RMSNorm has no shift to pass on: that its gain stays, any of these says"
NO_TAKER = "no bias behind this norm can take its shift, and its gain stays: which norm is read is not asked"

SURVIVORS_OF_TYPES: Mapping[str, Mapping[str, str]] = {
    TIED_RMS: {
        "tensors: model.embed_tokens.weight = .30 resid & .30 f* → .30 resid": (
            "ernie4_5 gemma gemma2 gemma3_text glm glm4 gpt_oss granite mixtral "
            "olmo2 olmo3 qwen2 qwen2_5_vl qwen2_moe qwen3 seed_oss smollm3"
        ),
    },
    SELF_DUAL: {
        "modules: classification_head.dense = pool o3* → pool* o3*": "bart",
        "modules: classification_head.out_proj = . pool* → . pool": "bart",
        "modules: fc1 = ff{i} m{i}* → ff{i}* m{i}*": "biogpt",
        "modules: fc2 = resid ff{i}* → resid ff{i}": "biogpt",
        "modules: ffn.down_proj = resid ff{i}* → resid ff{i}": "mpt",
        "modules: ffn.up_proj = ff{i} m{i}* → ff{i}* m{i}*": "mpt",
        "modules: mlp.c_fc = ff{i} m{i}* → ff{i}* m{i}*": "gpt_bigcode gpt_neo",
        "modules: mlp.c_proj = resid ff{i}* → resid ff{i}": "gpt_bigcode gpt_neo",
        "modules: mlp.dense_4h_to_h = resid ff{i}* → resid ff{i}": "bloom falcon",
        "modules: mlp.dense_h_to_4h = ff{i} a{i}* → ff{i}* a{i}*": "falcon",
        "modules: mlp.dense_h_to_4h = ff{i} m{i}* → ff{i}* m{i}*": "bloom falcon",
        "modules: mlp.down_proj = resid ff{i}* → resid ff{i}": "arcee",
        "modules: mlp.down_proj = resid ff{i}* → resid* ff{i}*": (
            "gemma gemma2 gemma3_text glm glm4 helium mistral olmo2 olmo3 qwen2 qwen2_5_vl qwen3 seed_oss smollm3"
        ),
        "modules: mlp.fc1 = ff{i} a{i}* → ff{i}* a{i}*": "phi",
        "modules: mlp.fc12 = |ff{i}| n{2i+1}* → |ff{i}|* n{2i+1}*": "nomic_bert",
        "modules: mlp.fc2 = resid ff{i}* → resid ff{i}": "phi",
        "modules: mlp.fc_in = ff{i} a{i}* → ff{i}* a{i}*": "gptj",
        "modules: mlp.fc_out = resid ff{i}* → resid ff{i}": "gptj",
        "modules: mlp.gate_proj = |ff{i}| a{i}* → |ff{i}|* a{i}*": "cohere cohere2 stablelm",
        "modules: mlp.gate_proj = |ff{i}| m{i}* → |ff{i}|* m{i}*": (
            "ernie4_5 gemma gemma2 gemma3_text granite helium mistral olmo "
            "qwen2 qwen2_5_vl qwen3 seed_oss smollm3 stablelm"
        ),
        "modules: mlp.gate_proj = |ff{i}| resid* → |ff{i}| resid": "olmo2 olmo3",
        "modules: mlp.gate_proj = |ff{i}| resid* → |ff{i}|* resid*": "olmo2 olmo3",
        "modules: mlp.gate_up_proj = |ff{i}|+ff{i} m{i}* → |ff{i}|*+ff{i} m{i}*": "glm glm4",
        "modules: mlp.up_proj = ff{i} m{i}* → ff{i}* m{i}*": "arcee",
        "modules: mlp.up_proj = ff{i} resid* → ff{i} resid": "olmo2 olmo3",
        "modules: model.layers.0.block_sparse_moe.experts.0.w1 = |ff0_0| m0* → |ff0_0|* m0*": "mixtral",
        "modules: model.layers.0.block_sparse_moe.experts.0.w2 = resid ff0_0* → resid* ff0_0*": "mixtral",
        "modules: model.layers.0.block_sparse_moe.gate = experts0 m0* → experts0* m0*": "mixtral",
        "modules: model.layers.0.mlp.down_proj = resid ff0* → resid* ff0*": "qwen2_moe qwen3_moe",
        "modules: model.layers.0.mlp.experts.0.down_proj = resid ff0_0* → resid* ff0_0*": "olmoe qwen2_moe qwen3_moe",
        "modules: model.layers.0.mlp.experts.0.gate_proj = m0* |ff0_0| → m0* |ff0_0|*": "gpt_oss",
        "modules: model.layers.0.mlp.experts.0.gate_proj = |ff0_0| m0* → |ff0_0|* m0*": "olmoe qwen2_moe qwen3_moe",
        "modules: model.layers.0.mlp.experts.0.up_proj = m0* ff0_0 → m0* ff0_0*": "gpt_oss",
        "modules: model.layers.0.mlp.gate = experts0 m0* → experts0* m0*": "olmoe qwen2_moe qwen3_moe",
        "modules: model.layers.0.mlp.gate_proj = |ff0| m0* → |ff0|* m0*": "qwen2_moe qwen3_moe",
        "modules: model.layers.0.mlp.router = experts0 m0* → experts0* m0*": "gpt_oss",
        "modules: model.layers.0.mlp.shared_expert.down_proj = resid shared0* → resid* shared0*": "qwen2_moe",
        "modules: model.layers.0.mlp.shared_expert.gate_proj = |shared0| m0* → |shared0|* m0*": "qwen2_moe",
        "modules: model.layers.1.mlp.experts.0.down_proj = resid ff1_0* → resid* ff1_0*": "qwen2_moe qwen3_moe",
        "modules: model.layers.1.mlp.experts.0.gate_proj = |ff1_0| m1* → |ff1_0|* m1*": "qwen2_moe qwen3_moe",
        "modules: model.layers.1.mlp.gate = experts1 m1* → experts1* m1*": "qwen2_moe qwen3_moe",
        "modules: model.layers.1.mlp.shared_expert.down_proj = resid shared1* → resid* shared1*": "qwen2_moe",
        "modules: model.layers.1.mlp.shared_expert.gate_proj = |shared1| m1* → |shared1|* m1*": "qwen2_moe",
        "modules: self_attn.k_proj = qk{i} a{i}* → qk{i}* a{i}*": "gemma3_text olmoe qwen3 qwen3_moe",
        "modules: self_attn.k_proj = qk{i} resid* → qk{i} resid": "olmo2 olmo3",
        "modules: self_attn.k_proj = qk{i} resid* → qk{i}* resid*": "olmo2 olmo3",
        "modules: self_attn.o_proj = resid vo{i}:q* → resid* vo{i}:q*": (
            "gemma2 gemma3_text glm glm4 helium mistral mixtral olmo3 olmoe qwen2 qwen2_5_vl qwen2_moe seed_oss"
        ),
        "modules: self_attn.q_proj = qk{i}:q* a{i}* → qk{i}:q a{i}*": "gemma3_text olmoe qwen3 qwen3_moe",
        "modules: self_attn.q_proj = qk{i}:q* resid* → qk{i}:q resid*": "olmo2 olmo3",
        "modules: self_attn.q_proj = qk{i}:q* resid* → qk{i}:q* resid": "olmo3",
        "modules: self_attn.v_proj = vo{i} resid* → vo{i} resid": "olmo2 olmo3",
        "modules: text_model.encoder.layers.0.mlp.fc1 = ff0 m0* → ff0* m0*": "clip_text_model",
        "modules: text_model.encoder.layers.0.mlp.fc2 = text ff0* → text ff0": "clip_text_model",
        "modules: vision_model.encoder.layers.0.mlp.fc1 = ff0 m0* → ff0* m0*": "clip_vision_model",
        "modules: vision_model.encoder.layers.0.mlp.fc2 = |vision| ff0* → |vision| ff0": "clip_vision_model",
        "tensors: biogpt.embed_tokens.weight = .30 resid & .30 f* → .30 resid* & .30 f*": "biogpt",
        "tensors: model.decoder.embed_tokens.weight = .30 resid & .30 f* → .30 resid* & .30 f*": "opt",
        "tensors: model.embed_tokens.weight = .30 resid & .30 f* → .30 resid* & .30 f*": (
            "cohere cohere2 ernie4_5 gemma gemma2 gemma3_text glm glm4 gpt_oss granite mixtral nemotron "
            "olmo2 olmo3 phi qwen2 qwen2_5_vl qwen2_moe qwen3 seed_oss smollm3 stablelm starcoder2"
        ),
        "tensors: model.embed_tokens.weight = .30 resid → .30 resid*": (
            "arcee ernie4_5 gemma gemma2 gemma3_text glm glm4 gpt_oss granite helium mistral mixtral "
            "olmo2 olmo3 olmoe qwen2 qwen2_5_vl qwen2_moe qwen3 qwen3_moe seed_oss smollm3"
        ),
        "tensors: model.shared.weight = .30 resid & .30 o2* → .30 resid* & .30 o2*": "bart",
        "tensors: model.shared.weight = .30 resid & .30 o3* → .30 resid* & .30 o3*": "bart",
        "tensors: nomic_bert.embeddings.word_embeddings.weight = .30 resid & .30 t* → .30 resid* & .30 t*": "nomic_bert",
        "tensors: shared.weight = .30 resid → .30 resid*": "t5",
        "tensors: transformer.word_embeddings.weight = .30 resid & .30 f* → .30 resid* & .30 f*": "bloom falcon",
        "tensors: transformer.wte.weight = .30 resid & .30 f* → .30 resid* & .30 f*": "gpt_bigcode gpt_neo gptj mpt",
    },
    NO_MEAN: {
        "spaces: experts0, stream=True": "gpt_oss mixtral olmoe qwen2_moe qwen3_moe",
        "spaces: experts1, stream=True": "qwen2_moe qwen3_moe",
        "spaces: ff0, stream=True": "bart clip_text_model clip_vision_model qwen2_moe qwen3_moe",
        "spaces: ff{i}, stream=True": (
            "arcee biogpt bloom cohere cohere2 ernie4_5 falcon gemma gemma2 gemma3_text glm glm4 gpt_bigcode gpt_neo gptj granite helium "
            "mistral mpt nemotron nomic_bert olmo olmo2 olmo3 opt phi qwen2 qwen2_5_vl qwen3 seed_oss smollm3 stablelm starcoder2"
        ),
        "spaces: pool, stream=True": "bart",
        "spaces: shared0, stream=True": "qwen2_moe",
        "spaces: shared1, stream=True": "qwen2_moe",
    },
    TIED: {
        "tensors: model.embed_tokens.weight = .30 resid & .30 f* → .30 resid & .30 .": (
            "ernie4_5 gemma gemma2 gemma3_text glm glm4 gpt_oss granite mixtral "
            "olmo2 olmo3 qwen2 qwen2_5_vl qwen2_moe qwen3 seed_oss smollm3"
        ),
    },
    BEHIND: {
        "norms: b{i} = rms(resid) → exposed": "glm4 olmo2 olmo3",
        "norms: b{i} = rms(resid) → layer": "glm4 olmo2 olmo3",
        "norms: b{i} = rms(resid) → plus_one": "glm4 olmo2 olmo3",
        "norms: b{i} = rms(resid, plus_one) → exposed": "gemma2 gemma3_text",
        "norms: b{i} = rms(resid, plus_one) → layer": "gemma2 gemma3_text",
        "norms: b{i} = rms(resid, plus_one) → nothing": "gemma2 gemma3_text",
        "norms: e = layer(resid) → plus_one": "bloom",
        "norms: n{i} = rms(resid) → exposed": "glm4 olmo2 olmo3",
        "norms: n{i} = rms(resid) → layer": "glm4 olmo2 olmo3",
        "norms: n{i} = rms(resid) → plus_one": "glm4 olmo2 olmo3",
        "norms: n{i} = rms(resid, plus_one) → exposed": "gemma2 gemma3_text",
        "norms: n{i} = rms(resid, plus_one) → layer": "gemma2 gemma3_text",
        "norms: n{i} = rms(resid, plus_one) → nothing": "gemma2 gemma3_text",
    },
    TRADE: {
        "heads: gains exchanged": "gemma3_text qwen3 qwen3_moe",
    },
    PLAIN: {
        "modules: mlp.gate_proj = |ff{i}| m{i}* → |ff{i}| a{i}*": "olmo",
        "modules: mlp.gate_proj = |ff{i}| m{i}* → |ff{i}| f*": "olmo",
        "modules: mlp.up_proj = ff{i} m{i}* → ff{i} a{i}*": "olmo",
        "modules: mlp.up_proj = ff{i} m{i}* → ff{i} f*": "olmo",
        "modules: self_attn.k_proj = qk{i} a{i}* → qk{i} f*": "olmo",
        "modules: self_attn.k_proj = qk{i} a{i}* → qk{i} m{i}*": "olmo",
        "modules: self_attn.q_proj = qk{i}:q* a{i}* → qk{i}:q* f*": "olmo",
        "modules: self_attn.q_proj = qk{i}:q* a{i}* → qk{i}:q* m{i}*": "olmo",
        "modules: self_attn.v_proj = vo{i} a{i}* → vo{i} f*": "olmo",
        "modules: self_attn.v_proj = vo{i} a{i}* → vo{i} m{i}*": "olmo",
        "norms: a{i} = layer(resid, plain) → exposed, plain": "olmo",
        "norms: a{i} = layer(resid, plain) → model.layers.{i}.post_attention_layernorm": "olmo",
        "norms: a{i} = layer(resid, plain) → model.norm": "olmo",
        "norms: f = layer(resid, exposed, plain) → ff{i}": "olmo",
        "norms: f = layer(resid, exposed, plain) → model.layers.{i}.input_layernorm": "olmo",
        "norms: f = layer(resid, exposed, plain) → model.layers.{i}.post_attention_layernorm": "olmo",
        "norms: f = layer(resid, exposed, plain) → plain": "olmo",
        "norms: f = layer(resid, plain) → model.layers.{i}.input_layernorm": "olmo",
        "norms: f = layer(resid, plain) → model.layers.{i}.post_attention_layernorm": "olmo",
        "norms: m{i} = layer(resid, plain) → exposed, plain": "olmo",
        "norms: m{i} = layer(resid, plain) → model.layers.{i}.input_layernorm": "olmo",
        "norms: m{i} = layer(resid, plain) → model.norm": "olmo",
        "tensors: lm_head.weight = .30 f* → .30 a{i}*": "olmo",
        "tensors: lm_head.weight = .30 f* → .30 m{i}*": "olmo",
        "tensors: model.embed_tokens.weight = .30 resid & .30 f* → .30 f*": "olmo",
        "tensors: model.embed_tokens.weight = .30 resid & .30 f* → .30 resid": "olmo",
        "tensors: model.embed_tokens.weight = .30 resid & .30 f* → .30 resid & .30 .": "olmo",
        "tensors: model.embed_tokens.weight = .30 resid & .30 f* → .30 resid & .30 a{i}*": "olmo",
        "tensors: model.embed_tokens.weight = .30 resid & .30 f* → .30 resid & .30 m{i}*": "olmo",
    },
    NO_SCALES: {
        "modules: fc1 = ff{i} m{i}* → |ff{i}| m{i}*": "biogpt",
        "modules: fc2 = resid ff{i}* → resid |ff{i}|*": "biogpt",
        "modules: ffn.down_proj = resid ff{i}* → resid |ff{i}|*": "mpt",
        "modules: ffn.up_proj = ff{i} m{i}* → |ff{i}| m{i}*": "mpt",
        "modules: mlp.c_fc = ff{i} m{i}* → |ff{i}| m{i}*": "gpt_bigcode gpt_neo",
        "modules: mlp.c_proj = resid ff{i}* → resid |ff{i}|*": "gpt_bigcode gpt_neo",
        "modules: mlp.dense_4h_to_h = resid ff{i}* → resid |ff{i}|*": "bloom falcon",
        "modules: mlp.dense_h_to_4h = ff{i} a{i}* → |ff{i}| a{i}*": "falcon",
        "modules: mlp.dense_h_to_4h = ff{i} m{i}* → |ff{i}| m{i}*": "bloom falcon",
        "modules: mlp.down_proj = resid ff{i}* → resid |ff{i}|*": "arcee",
        "modules: mlp.fc1 = ff{i} a{i}* → |ff{i}| a{i}*": "phi",
        "modules: mlp.fc2 = resid ff{i}* → resid |ff{i}|*": "phi",
        "modules: mlp.fc_in = ff{i} a{i}* → |ff{i}| a{i}*": "gptj",
        "modules: mlp.fc_out = resid ff{i}* → resid |ff{i}|*": "gptj",
        "modules: mlp.up_proj = ff{i} m{i}* → |ff{i}| m{i}*": "arcee",
        "modules: model.layers.0.block_sparse_moe.gate = experts0 m0* → |experts0| m0*": "mixtral",
        "modules: model.layers.0.mlp.experts.0.down_proj = ff0_0* resid → |ff0_0|* resid": "gpt_oss",
        "modules: model.layers.0.mlp.experts.0.gate_proj = m0* |ff0_0| → m0* ff0_0": "gpt_oss",
        "modules: model.layers.0.mlp.experts.0.up_proj = m0* ff0_0 → m0* |ff0_0|": "gpt_oss",
        "modules: model.layers.0.mlp.gate = experts0 m0* → |experts0| m0*": "olmoe qwen2_moe qwen3_moe",
        "modules: model.layers.0.mlp.router = experts0 m0* → |experts0| m0*": "gpt_oss",
        "modules: model.layers.1.mlp.gate = experts1 m1* → |experts1| m1*": "qwen2_moe qwen3_moe",
        "modules: text_model.encoder.layers.0.mlp.fc1 = ff0 m0* → |ff0| m0*": "clip_text_model",
        "modules: text_model.encoder.layers.0.mlp.fc2 = text ff0* → text |ff0|*": "clip_text_model",
        "modules: vision_model.encoder.layers.0.mlp.fc1 = ff0 m0* → |ff0| m0*": "clip_vision_model",
        "modules: vision_model.encoder.layers.0.mlp.fc2 = |vision| ff0* → |vision| |ff0|*": "clip_vision_model",
        "tensors: nomic_bert.embeddings.word_embeddings.weight = .30 resid & .30 t* → .30 |resid| & .30 t*": "nomic_bert",
        "tensors: shared.weight = .30 resid → .30 |resid|": "t5",
    },
    OPTIONAL: {
        "aliases: lm_head.weight left out": "t5",
        "tensors: cls.predictions.bias = ?.30 → .30": "nomic_bert",
        "tensors: final_logits_bias = ?.1 .30 → .1 .30": "bart",
    },
    UNREAD: {
        "norms: f = rms(resid, exposed) → layer": "t5",
        "norms: f = rms(resid, exposed) → nothing": "t5",
        "norms: f = rms(resid, exposed) → plus_one": "t5",
        "tensors: shared.weight = .30 resid → .30 .": "t5",
    },
    NO_ROTARY: {
        "heads: cross2, interleaved=True": "bart t5",
        "heads: heads0, interleaved=True": "bart clip_text_model clip_vision_model t5",
        "heads: interleaved=True": "biogpt bloom gpt_bigcode gpt_neo mpt opt",
    },
    NO_GROUPS: {
        "modules: attn.Wqkv = qk{i}*+qk{i}+vo{i} a{i}* → qk{i}*+qk{i}+vo{i}:q a{i}*": "mpt",
        "modules: attn.Wqkv = qk{i}*+qk{i}+vo{i} a{i}* → qk{i}*+qk{i}:q+vo{i} a{i}*": "mpt",
        "modules: attn.Wqkv = qk{i}*+qk{i}+vo{i} a{i}* → qk{i}:q*+qk{i}+vo{i} a{i}*": "mpt",
        "modules: attn.Wqkv = qk{i}*+qk{i}+vo{i} n{2i}* → qk{i}*+qk{i}+vo{i}:q n{2i}*": "nomic_bert",
        "modules: attn.Wqkv = qk{i}*+qk{i}+vo{i} n{2i}* → qk{i}*+qk{i}:q+vo{i} n{2i}*": "nomic_bert",
        "modules: attn.Wqkv = qk{i}*+qk{i}+vo{i} n{2i}* → qk{i}:q*+qk{i}+vo{i} n{2i}*": "nomic_bert",
        "modules: attn.attention.k_proj = qk{i} a{i}* → qk{i}:q a{i}*": "gpt_neo",
        "modules: attn.attention.out_proj = resid vo{i}* → resid vo{i}:q*": "gpt_neo",
        "modules: attn.attention.q_proj = qk{i}* a{i}* → qk{i}:q* a{i}*": "gpt_neo",
        "modules: attn.attention.v_proj = vo{i} a{i}* → vo{i}:q a{i}*": "gpt_neo",
        "modules: attn.k_proj = qk{i} a{i}* → qk{i}:q a{i}*": "gptj",
        "modules: attn.out_proj = resid vo{i}* → resid vo{i}:q*": "gptj mpt nomic_bert",
        "modules: attn.q_proj = qk{i}* a{i}* → qk{i}:q* a{i}*": "gptj",
        "modules: attn.v_proj = vo{i} a{i}* → vo{i}:q a{i}*": "gptj",
        "modules: model.decoder.layers.0.encoder_attn.k_proj = xqk2 o1* → xqk2:q o1*": "bart",
        "modules: model.decoder.layers.0.encoder_attn.out_proj = resid xvo2* → resid xvo2:q*": "bart",
        "modules: model.decoder.layers.0.encoder_attn.q_proj = xqk2* s2* → xqk2:q* s2*": "bart",
        "modules: model.decoder.layers.0.encoder_attn.v_proj = xvo2 o1* → xvo2:q o1*": "bart",
        "modules: model.decoder.layers.0.self_attn.k_proj = qk2 n_decoder* → qk2:q n_decoder*": "bart",
        "modules: model.decoder.layers.0.self_attn.out_proj = resid vo2* → resid vo2:q*": "bart",
        "modules: model.decoder.layers.0.self_attn.q_proj = qk2* n_decoder* → qk2:q* n_decoder*": "bart",
        "modules: model.decoder.layers.0.self_attn.v_proj = vo2 n_decoder* → vo2:q n_decoder*": "bart",
        "modules: model.decoder.layers.1.self_attn.k_proj = qk3 o2* → qk3:q o2*": "bart",
        "modules: model.decoder.layers.1.self_attn.q_proj = qk3* o2* → qk3:q* o2*": "bart",
        "modules: model.decoder.layers.1.self_attn.v_proj = vo3 o2* → vo3:q o2*": "bart",
        "modules: model.encoder.layers.0.self_attn.k_proj = qk0 n_encoder* → qk0:q n_encoder*": "bart",
        "modules: model.encoder.layers.0.self_attn.out_proj = resid vo0* → resid vo0:q*": "bart",
        "modules: model.encoder.layers.0.self_attn.q_proj = qk0* n_encoder* → qk0:q* n_encoder*": "bart",
        "modules: model.encoder.layers.0.self_attn.v_proj = vo0 n_encoder* → vo0:q n_encoder*": "bart",
        "modules: model.encoder.layers.1.self_attn.k_proj = qk1 o0* → qk1:q o0*": "bart",
        "modules: model.encoder.layers.1.self_attn.q_proj = qk1* o0* → qk1:q* o0*": "bart",
        "modules: model.encoder.layers.1.self_attn.v_proj = vo1 o0* → vo1:q o0*": "bart",
        "modules: self_attention.dense = resid vo{i}* → resid vo{i}:q*": "bloom",
        "modules: self_attention.query_key_value = (qk{i}*+qk{i}+vo{i}) a{i}* → (qk{i}*+qk{i}+vo{i}:q) a{i}*": "bloom",
        "modules: self_attention.query_key_value = (qk{i}*+qk{i}+vo{i}) a{i}* → (qk{i}*+qk{i}:q+vo{i}) a{i}*": "bloom",
        "modules: self_attention.query_key_value = (qk{i}*+qk{i}+vo{i}) a{i}* → (qk{i}:q*+qk{i}+vo{i}) a{i}*": "bloom",
        "modules: self_attn.k_proj = qk{i} a{i}* → qk{i}:q a{i}*": "biogpt opt",
        "modules: self_attn.out_proj = resid vo{i}* → resid vo{i}:q*": "biogpt opt",
        "modules: self_attn.q_proj = qk{i}* a{i}* → qk{i}:q* a{i}*": "biogpt opt",
        "modules: self_attn.v_proj = vo{i} a{i}* → vo{i}:q a{i}*": "biogpt opt",
        "modules: text_model.encoder.layers.0.self_attn.k_proj = qk0 a0* → qk0:q a0*": "clip_text_model",
        "modules: text_model.encoder.layers.0.self_attn.out_proj = text vo0* → text vo0:q*": "clip_text_model",
        "modules: text_model.encoder.layers.0.self_attn.q_proj = qk0* a0* → qk0:q* a0*": "clip_text_model",
        "modules: text_model.encoder.layers.0.self_attn.v_proj = vo0 a0* → vo0:q a0*": "clip_text_model",
        "modules: vision_model.encoder.layers.0.self_attn.k_proj = qk0 a0* → qk0:q a0*": "clip_vision_model",
        "modules: vision_model.encoder.layers.0.self_attn.out_proj = |vision| vo0* → |vision| vo0:q*": "clip_vision_model",
        "modules: vision_model.encoder.layers.0.self_attn.q_proj = qk0* a0* → qk0:q* a0*": "clip_vision_model",
        "modules: vision_model.encoder.layers.0.self_attn.v_proj = vo0 a0* → vo0:q a0*": "clip_vision_model",
    },
    TIED_NORM: {
        "norms: o2 = layer(resid) → exposed": "bart",
        "norms: o2 = layer(resid) → plus_one": "bart",
        "norms: o2 = layer(resid) → skip=model.decoder.layers.0.encoder_attn.out_proj": "bart",
        "norms: o2 = layer(resid) → skip=model.decoder.layers.0.fc2": "bart",
        "norms: o2 = layer(resid) → skip=model.decoder.layers.0.self_attn.out_proj": "bart",
        "norms: o2 = layer(resid) → skip=model.encoder.layers.0.fc2": "bart",
        "norms: o2 = layer(resid) → skip=model.encoder.layers.0.self_attn.out_proj": "bart",
        "norms: o2 = layer(resid) → skip=model.encoder.layers.1.fc2": "bart",
        "norms: o2 = layer(resid) → skip=model.encoder.layers.1.self_attn.out_proj": "bart",
    },
    SIDES: {
        "sums: class, turned round": "clip_vision_model",
        "sums: out0, turned round": "falcon phi",
        "sums: positions, turned round": "clip_text_model gpt_bigcode gpt_neo opt",
        "sums: types, turned round": "nomic_bert",
    },
    ONE_ROW: {
        "sums: class, give the first row of vision_model.embeddings.class_embedding": "clip_vision_model",
        "sums: out0, give the first row of model.layers.0.self_attn.dense.bias": "phi",
        "sums: out0, give the first row of transformer.h.0.self_attention.dense.bias": "falcon",
        "sums: out0, take the first row of model.layers.0.mlp.fc2.bias": "phi",
        "sums: out0, take the first row of transformer.h.0.mlp.dense_4h_to_h.bias": "falcon",
        "sums: words, give the first row of nomic_bert.embeddings.word_embeddings.weight": "nomic_bert",
        "sums: words, take the first row of nomic_bert.embeddings.token_type_embeddings.weight": "nomic_bert",
    },
    DUAL_HEADS: {
        "modules: attn.Wqkv = qk{i}*+qk{i}+vo{i} a{i}* → qk{i}+qk{i}*+vo{i} a{i}*": "mpt",
        "modules: attn.Wqkv = qk{i}*+qk{i}+vo{i} n{2i}* → qk{i}+qk{i}*+vo{i} n{2i}*": "nomic_bert",
    },
    FIXED: {
        "modules: vision_model.encoder.layers.0.mlp.fc2 = |vision| ff0* → . ff0*": "clip_vision_model",
        "modules: vision_model.encoder.layers.0.self_attn.out_proj = |vision| vo0* → . vo0*": "clip_vision_model",
        "tensors: text_projection.weight = .7 text_last* → .7 .": "clip_text_model",
    },
    NO_TAKER: {
        "modules: mlp.fc11 = ff{i} n{2i+1}* → ff{i} n{2i}*": "nomic_bert",
        "modules: mlp.fc12 = |ff{i}| n{2i+1}* → |ff{i}| n{2i}*": "nomic_bert",
        "norms: n0 = layer(resid, skip) → exposed": "nomic_bert",
        "norms: n0 = layer(resid, skip) → skip=nomic_bert.encoder.layers.{i+1}.attn.out_proj": "nomic_bert",
        "norms: n0 = layer(resid, skip) → skip=nomic_bert.encoder.layers.{i}.mlp.fc2": "nomic_bert",
        "norms: n{2i+1} = layer(resid, skip) → exposed": "nomic_bert",
        "norms: n{2i+1} = layer(resid, skip) → skip=nomic_bert.encoder.layers.0.attn.out_proj": "nomic_bert",
        "norms: n{2i+1} = layer(resid, skip) → skip=nomic_bert.encoder.layers.{i+1}.attn.out_proj": "nomic_bert",
        "norms: n{2i+2} = layer(resid, skip) → exposed": "nomic_bert",
        "norms: n{2i+2} = layer(resid, skip) → skip=nomic_bert.encoder.layers.0.attn.out_proj": "nomic_bert",
        "norms: n{2i+2} = layer(resid, skip) → skip=nomic_bert.encoder.layers.{i}.mlp.fc2": "nomic_bert",
    },
}
