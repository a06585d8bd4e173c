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
FIXED = "outputs lie in this space, so it does not move, and whatever else does not move may stand for it"
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
UNREAD_ROWS = "what is added there, or left out there, is in rows or tensors that no input reads"
TWICE = "the classifier reads one norm twice, so its gain is permuted and no more: which norm is named is not asked"
OTHER_CLASS = "the description of another class of the type covers the tensor as well, and moves it in the same way"

SURVIVORS_OF_TYPES: Mapping[str, Mapping[str, str]] = {
    TIED_RMS: {
        "tensors: model.embed_tokens.weight = .30 resid & .30 f* → .30 resid": (
            "deepseek_v3 ernie4_5 gemma gemma2 gemma3 gemma3_text glm glm4 gpt_oss granite llava mixtral "
            "olmo2 olmo3 qwen2 qwen2_5_vl qwen2_moe qwen3 seed_oss smollm3"
        ),
        "tensors: shared.weight = .30 resid & .30 f* → .30 resid": "mt5 umt5",
    },
    SELF_DUAL: {
        "modules: classification_head.dense = pool o3* → pool* o3*": "bart",
        "modules: classification_head.out_proj = . pool* → . pool": "bart",
        "modules: classifier = . pool* → . pool": "ernie",
        "modules: classifier.dense = pool n4* → pool* n4*": "camembert data2vec-text mpnet roberta xlm-roberta",
        "modules: classifier.out_proj = . pool* → . pool": "camembert data2vec-text mpnet roberta xlm-roberta",
        "modules: cls.predictions.transform.dense = mlm n4* → mlm* n4*": "ernie",
        "modules: ernie.pooler.dense = pool n4* → pool* n4*": "ernie",
        "modules: fc1 = ff{i} m{i}* → ff{i}* m{i}*": "biogpt",
        "modules: fc2 = resid ff{i}* → resid ff{i}": "biogpt",
        "modules: ffn.down_proj = resid ff{i}* → resid ff{i}": "mpt",
        "modules: ffn.up_proj = ff{i} m{i}* → ff{i}* m{i}*": "mpt",
        "modules: head.dense = pool f* → pool* f*": "modernbert",
        "modules: head.dense = |resid| f* → |resid|* f*": "modernbert",
        "modules: lm_head.dense = mlm n4* → mlm* n4*": "camembert data2vec-text mpnet roberta xlm-roberta",
        "modules: mlp.Wi = |ff{i}|+ff{i} m{i}* → |ff{i}|*+ff{i} m{i}*": "modernbert",
        "modules: mlp.c_fc = ff{i} m{i}* → ff{i}* m{i}*": "gpt_bigcode gpt_neo",
        "modules: mlp.c_proj = resid ff{i}* → resid ff{i}": "gpt_bigcode gpt_neo",
        "modules: mlp.dense_4h_to_h = resid ff{i}* → resid ff{i}": "bloom falcon",
        "modules: mlp.dense_h_to_4h = ff{i} a{i}* → ff{i}* a{i}*": "falcon",
        "modules: mlp.dense_h_to_4h = ff{i} m{i}* → ff{i}* m{i}*": "bloom falcon",
        "modules: mlp.down_proj = resid ff{i}* → resid ff{i}": "arcee",
        "modules: mlp.down_proj = resid ff{i}* → resid* ff{i}*": (
            "gemma gemma2 gemma3 gemma3_text glm glm4 helium llava mistral olmo2 olmo3 qwen2 qwen2_5_vl "
            "qwen2_vl qwen3 seed_oss smollm3"
        ),
        "modules: mlp.fc1 = ff{i} a{i}* → ff{i}* a{i}*": "phi",
        "modules: mlp.fc12 = |ff{i}| n{2i+1}* → |ff{i}|* n{2i+1}*": "nomic_bert",
        "modules: mlp.fc2 = resid ff{i}* → resid ff{i}": "phi",
        "modules: mlp.fc_in = ff{i} a{i}* → ff{i}* a{i}*": "gptj",
        "modules: mlp.fc_out = resid ff{i}* → resid ff{i}": "gptj",
        "modules: mlp.gate_proj = |ff{i}| a{i}* → |ff{i}|* a{i}*": "cohere cohere2 stablelm",
        "modules: mlp.gate_proj = |ff{i}| m{i}* → |ff{i}|* m{i}*": (
            "ernie4_5 gemma gemma2 gemma3 gemma3_text granite helium llava mistral olmo qwen2 qwen2_5_vl "
            "qwen2_vl qwen3 seed_oss smollm3 stablelm"
        ),
        "modules: mlp.gate_proj = |ff{i}| resid* → |ff{i}| resid": "olmo2 olmo3",
        "modules: mlp.gate_proj = |ff{i}| resid* → |ff{i}|* resid*": "olmo2 olmo3",
        "modules: mlp.gate_up_proj = |ff{i}|+ff{i} m{i}* → |ff{i}|*+ff{i} m{i}*": "glm glm4",
        "modules: mlp.up_proj = ff{i} m{i}* → ff{i}* m{i}*": "arcee",
        "modules: mlp.up_proj = ff{i} resid* → ff{i} resid": "olmo2 olmo3",
        "modules: mlp.weights_in = |ff{i}|+ff{i} m{i}* → |ff{i}|*+ff{i} m{i}*": "dinov2",
        "modules: model.layers.0.block_sparse_moe.experts.0.w1 = |ff0_0| m0* → |ff0_0|* m0*": "mixtral",
        "modules: model.layers.0.block_sparse_moe.experts.0.w2 = resid ff0_0* → resid* ff0_0*": "mixtral",
        "modules: model.layers.0.block_sparse_moe.gate = experts0 m0* → experts0* m0*": "mixtral",
        "modules: model.layers.0.mlp.down_proj = resid ff0* → resid* ff0*": "deepseek_v3 qwen2_moe qwen3_moe",
        "modules: model.layers.0.mlp.experts.0.down_proj = resid ff0_0* → resid* ff0_0*": "deepseek_v3 olmoe qwen2_moe qwen3_moe",
        "modules: model.layers.0.mlp.experts.0.gate_proj = m0* |ff0_0| → m0* |ff0_0|*": "gpt_oss",
        "modules: model.layers.0.mlp.experts.0.gate_proj = |ff0_0| m0* → |ff0_0|* m0*": "deepseek_v3 olmoe qwen2_moe qwen3_moe",
        "modules: model.layers.0.mlp.experts.0.up_proj = m0* ff0_0 → m0* ff0_0*": "gpt_oss",
        "modules: model.layers.0.mlp.gate = experts0 m0* → experts0* m0*": "deepseek_v3 olmoe qwen2_moe qwen3_moe",
        "modules: model.layers.0.mlp.gate_proj = |ff0| m0* → |ff0|* m0*": "deepseek_v2 deepseek_v3 qwen2_moe qwen3_moe",
        "modules: model.layers.0.mlp.router = experts0 m0* → experts0* m0*": "gpt_oss",
        "modules: model.layers.0.mlp.shared_expert.down_proj = resid shared0* → resid* shared0*": "qwen2_moe",
        "modules: model.layers.0.mlp.shared_expert.gate_proj = |shared0| m0* → |shared0|* m0*": "qwen2_moe",
        "modules: model.layers.0.mlp.shared_experts.down_proj = resid shared0* → resid* shared0*": "deepseek_v3",
        "modules: model.layers.0.mlp.shared_experts.gate_proj = |shared0| m0* → |shared0|* m0*": "deepseek_v3",
        "modules: model.layers.1.mlp.experts.0.down_proj = resid ff1_0* → resid* ff1_0*": (
            "deepseek_v2 deepseek_v3 qwen2_moe qwen3_moe"
        ),
        "modules: model.layers.1.mlp.experts.0.gate_proj = |ff1_0| m1* → |ff1_0|* m1*": (
            "deepseek_v2 deepseek_v3 qwen2_moe qwen3_moe"
        ),
        "modules: model.layers.1.mlp.gate = experts1 m1* → experts1* m1*": (
            "deepseek_v2 deepseek_v3 qwen2_moe qwen3_moe"
        ),
        "modules: model.layers.1.mlp.shared_expert.down_proj = resid shared1* → resid* shared1*": "qwen2_moe",
        "modules: model.layers.1.mlp.shared_expert.gate_proj = |shared1| m1* → |shared1|* m1*": "qwen2_moe",
        "modules: model.layers.1.mlp.shared_experts.down_proj = resid shared1* → resid* shared1*": "deepseek_v3",
        "modules: model.layers.1.mlp.shared_experts.gate_proj = |shared1| m1* → |shared1|* m1*": "deepseek_v2 deepseek_v3",
        "modules: self_attn.k_proj = qk{i} a{i}* → qk{i}* a{i}*": "gemma3 gemma3_text olmoe qwen3 qwen3_moe",
        "modules: self_attn.k_proj = qk{i} resid* → qk{i} resid": "olmo2 olmo3",
        "modules: self_attn.k_proj = qk{i} resid* → qk{i}* resid*": "olmo2 olmo3",
        "modules: self_attn.o_proj = resid vo{i}:q* → resid* vo{i}:q*": (
            "gemma2 gemma3 gemma3_text glm glm4 helium mistral mixtral olmo3 olmoe qwen2 qwen2_5_vl "
            "qwen2_moe qwen2_vl seed_oss"
        ),
        "modules: self_attn.q_proj = qk{i}:q* a{i}* → qk{i}:q a{i}*": "gemma3 gemma3_text olmoe qwen3 qwen3_moe",
        "modules: self_attn.q_proj = qk{i}:q* resid* → qk{i}:q resid*": "olmo2 olmo3",
        "modules: self_attn.q_proj = qk{i}:q* resid* → qk{i}:q* resid": "olmo3",
        "modules: self_attn.v_proj = vo{i} resid* → vo{i} resid": "olmo2 olmo3",
        "modules: text_model.encoder.layers.0.mlp.fc1 = ff0 m0* → ff0* m0*": "clip clip_text_model siglip",
        "modules: text_model.encoder.layers.0.mlp.fc2 = text ff0* → text ff0": "clip clip_text_model siglip",
        "modules: vision_model.encoder.layers.0.mlp.fc1 = ff0 m0* → ff0* m0*": "clip_vision_model",
        "modules: vision_model.encoder.layers.0.mlp.fc1 = ff2 m2* → ff2* m2*": "clip siglip",
        "modules: vision_model.encoder.layers.0.mlp.fc2 = vision ff2* → vision ff2": "clip siglip",
        "modules: vision_model.encoder.layers.0.mlp.fc2 = |vision| ff0* → |vision| ff0": "clip_vision_model",
        "modules: vision_model.head.mlp.fc1 = ff4 pool* → ff4* pool*": "siglip",
        "modules: vision_model.head.mlp.fc2 = |joint| ff4* → |joint| ff4": "siglip",
        "modules: vocab_transform = mlm n4* → mlm* n4*": "distilbert",
        "tensors: attention.attention.relative_position_bias.relative_position_bias_table = .28 heads{i} → .28 heads{i}*": "beit",
        "tensors: biogpt.embed_tokens.weight = .30 resid & .30 f* → .30 resid* & .30 f*": "biogpt",
        "tensors: data2vec_text.embeddings.word_embeddings.weight = .30 resid & .30 t* → .30 resid* & .30 t*": "data2vec-text",
        "tensors: decoder.block.0.layer.0.SelfAttention.o.weight = resid vo2* → resid* vo2*": "mt5 umt5",
        "tensors: decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight = .8 heads2 → .8 heads2*": "umt5",
        "tensors: decoder.block.0.layer.1.EncDecAttention.o.weight = resid xvo2* → resid* xvo2*": "mt5 umt5",
        "tensors: decoder.block.0.layer.2.DenseReluDense.wi_0.weight = |ff2| m2* → |ff2|* m2*": "mt5 umt5",
        "tensors: decoder.block.0.layer.2.DenseReluDense.wo.weight = resid ff2* → resid* ff2*": "mt5 umt5",
        "tensors: distilbert.embeddings.word_embeddings.weight = .30 resid & .30 t* → .30 resid* & .30 t*": "distilbert",
        "tensors: encoder.block.0.layer.0.SelfAttention.o.weight = resid vo0* → resid* vo0*": "mt5 umt5",
        "tensors: encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight = .8 heads0 → .8 heads0*": "umt5",
        "tensors: encoder.block.0.layer.1.DenseReluDense.wi_0.weight = |ff0| m0* → |ff0|* m0*": "mt5 umt5",
        "tensors: encoder.block.0.layer.1.DenseReluDense.wo.weight = resid ff0* → resid* ff0*": "mt5 umt5",
        "tensors: ernie.embeddings.word_embeddings.weight = .30 resid & .30 t* → .30 resid* & .30 t*": "ernie",
        "tensors: model.decoder.embed_tokens.weight = .30 dec & .30 f* → .30 dec* & .30 f*": "whisper",
        "tensors: model.decoder.embed_tokens.weight = .30 resid & .30 f* → .30 resid* & .30 f*": "opt",
        "tensors: model.embed_tokens.weight = .30 resid & .30 f* → .30 resid* & .30 f*": (
            "cohere cohere2 deepseek_v3 ernie4_5 gemma gemma2 gemma3 gemma3_text glm glm4 gpt_oss granite "
            "llava mixtral nemotron olmo2 olmo3 phi qwen2 qwen2_5_vl qwen2_moe qwen3 seed_oss smollm3 "
            "stablelm starcoder2"
        ),
        "tensors: model.embed_tokens.weight = .30 resid → .30 resid*": (
            "arcee deepseek_v2 deepseek_v3 ernie4_5 gemma gemma2 gemma3_text glm glm4 gpt_oss granite "
            "helium llava mistral mixtral olmo2 olmo3 olmoe qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 "
            "qwen3_moe seed_oss smollm3"
        ),
        "tensors: model.embeddings.tok_embeddings.weight = .30 resid & .30 t* → .30 resid* & .30 t*": "modernbert",
        "tensors: model.encoder.conv1.bias = conv → conv*": "whisper",
        "tensors: model.encoder.conv1.weight = conv .5 .3 → conv* .5 .3": "whisper",
        "tensors: model.encoder.conv2.bias = |enc| → |enc|*": "whisper",
        "tensors: model.encoder.conv2.weight = |enc| conv* .3 → |enc| conv .3": "whisper",
        "tensors: model.encoder.conv2.weight = |enc| conv* .3 → |enc|* conv* .3": "whisper",
        "tensors: model.layers.0.mlp.gate.e_score_correction_bias = experts0 → experts0*": "deepseek_v3",
        "tensors: model.layers.1.mlp.gate.e_score_correction_bias = experts1 → experts1*": "deepseek_v3",
        "tensors: model.shared.weight = .30 resid & .30 f* → .30 resid* & .30 f*": "mbart",
        "tensors: model.shared.weight = .30 resid & .30 o2* → .30 resid* & .30 o2*": "bart",
        "tensors: model.shared.weight = .30 resid & .30 o3* → .30 resid* & .30 o3*": "bart",
        "tensors: mpnet.embeddings.word_embeddings.weight = .30 resid & .30 t* → .30 resid* & .30 t*": "mpnet",
        "tensors: nomic_bert.embeddings.word_embeddings.weight = .30 resid & .30 t* → .30 resid* & .30 t*": "nomic_bert",
        "tensors: roberta.embeddings.word_embeddings.weight = .30 resid & .30 t* → .30 resid* & .30 t*": "camembert roberta xlm-roberta",
        "tensors: shared.weight = .30 resid & .30 f* → .30 resid* & .30 f*": "mt5 umt5",
        "tensors: shared.weight = .30 resid → .30 resid*": "t5",
        "tensors: transformer.word_embeddings.weight = .30 resid & .30 f* → .30 resid* & .30 f*": "bloom falcon",
        "tensors: transformer.wte.weight = .30 resid & .30 f* → .30 resid* & .30 f*": "gpt_bigcode gpt_neo gptj mpt",
    },
    NO_MEAN: {
        "spaces: conv, stream=True": "whisper",
        "spaces: experts0, stream=True": "deepseek_v3 gpt_oss mixtral olmoe qwen2_moe qwen3_moe",
        "spaces: experts1, stream=True": "deepseek_v2 deepseek_v3 qwen2_moe qwen3_moe",
        "spaces: ff0, stream=True": (
            "bart clip clip_text_model clip_vision_model deepseek_v2 deepseek_v3 mbart mt5 qwen2_moe "
            "qwen3_moe siglip_text_model umt5 whisper"
        ),
        "spaces: ff{i}, stream=True": (
            "arcee beit biogpt bloom camembert cohere cohere2 data2vec-text deit dinov2 distilbert ernie "
            "ernie4_5 falcon gemma gemma2 gemma3 gemma3_text glm glm4 gpt_bigcode gpt_neo gptj granite "
            "helium llava mistral modernbert mpnet mpt nemotron nomic_bert olmo olmo2 olmo3 opt phi qwen2 "
            "qwen2_5_vl qwen2_vl qwen3 roberta seed_oss smollm3 stablelm starcoder2 xlm-roberta"
        ),
        "spaces: pool, stream=True": "bart camembert data2vec-text distilbert ernie mpnet roberta xlm-roberta",
        "spaces: shared0, stream=True": "deepseek_v3 qwen2_moe",
        "spaces: shared1, stream=True": "deepseek_v2 deepseek_v3 qwen2_moe",
    },
    TIED: {
        "tensors: model.embed_tokens.weight = .30 resid & .30 f* → .30 resid & .30 .": (
            "deepseek_v3 ernie4_5 gemma gemma2 gemma3 gemma3_text glm glm4 gpt_oss granite llava mixtral "
            "olmo2 olmo3 qwen2 qwen2_5_vl qwen2_moe qwen3 seed_oss smollm3"
        ),
        "tensors: shared.weight = .30 resid & .30 f* → .30 resid & .30 .": "mt5 umt5",
    },
    BEHIND: {
        "norms: b{i} = rms(resid) → exposed": "glm4 olmo2 olmo3",
        "norms: b{i} = rms(resid) → layer": "glm4 olmo2 olmo3",
        "norms: b{i} = rms(resid) → plus_one": "glm4 olmo2 olmo3",
        "norms: b{i} = rms(resid, plus_one) → exposed": "gemma2 gemma3 gemma3_text",
        "norms: b{i} = rms(resid, plus_one) → layer": "gemma2 gemma3 gemma3_text",
        "norms: b{i} = rms(resid, plus_one) → nothing": "gemma2 gemma3 gemma3_text",
        "norms: e = layer(resid) → plus_one": "bloom",
        "norms: n_decoder = layer(resid) → plus_one": "mbart",
        "norms: n_encoder = layer(resid) → plus_one": "mbart",
        "norms: n{i} = rms(resid) → exposed": "glm4 olmo2 olmo3",
        "norms: n{i} = rms(resid) → layer": "glm4 olmo2 olmo3",
        "norms: n{i} = rms(resid) → plus_one": "glm4 olmo2 olmo3",
        "norms: n{i} = rms(resid, plus_one) → exposed": "gemma2 gemma3 gemma3_text",
        "norms: n{i} = rms(resid, plus_one) → layer": "gemma2 gemma3 gemma3_text",
        "norms: n{i} = rms(resid, plus_one) → nothing": "gemma2 gemma3 gemma3_text",
        "norms: vision_first = layer(vision) → plus_one": "clip",
    },
    TRADE: {
        "heads: gains exchanged": "gemma3 gemma3_text qwen3 qwen3_moe",
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
        "modules: cls.predictions.transform.dense = mlm n4* → |mlm| n4*": "ernie",
        "modules: fc1 = ff{i} m{i}* → |ff{i}| m{i}*": "biogpt",
        "modules: fc2 = resid ff{i}* → resid |ff{i}|*": "biogpt",
        "modules: ffn.down_proj = resid ff{i}* → resid |ff{i}|*": "mpt",
        "modules: ffn.up_proj = ff{i} m{i}* → |ff{i}| m{i}*": "mpt",
        "modules: head.dense = pool f* → |pool| f*": "modernbert",
        "modules: lm_head.dense = mlm n4* → |mlm| n4*": "camembert data2vec-text mpnet roberta xlm-roberta",
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
        "modules: model.layers.0.mlp.gate = experts0 m0* → |experts0| m0*": "deepseek_v3 olmoe qwen2_moe qwen3_moe",
        "modules: model.layers.0.mlp.router = experts0 m0* → |experts0| m0*": "gpt_oss",
        "modules: model.layers.1.mlp.gate = experts1 m1* → |experts1| m1*": (
            "deepseek_v2 deepseek_v3 qwen2_moe qwen3_moe"
        ),
        "modules: text_model.encoder.layers.0.mlp.fc1 = ff0 m0* → |ff0| m0*": "clip clip_text_model siglip",
        "modules: text_model.encoder.layers.0.mlp.fc2 = text ff0* → text |ff0|*": "clip clip_text_model siglip",
        "modules: vision_model.encoder.layers.0.mlp.fc1 = ff0 m0* → |ff0| m0*": "clip_vision_model",
        "modules: vision_model.encoder.layers.0.mlp.fc1 = ff2 m2* → |ff2| m2*": "clip siglip",
        "modules: vision_model.encoder.layers.0.mlp.fc2 = vision ff2* → vision |ff2|*": "clip siglip",
        "modules: vision_model.encoder.layers.0.mlp.fc2 = |vision| ff0* → |vision| |ff0|*": "clip_vision_model",
        "modules: vision_model.head.mlp.fc1 = ff4 pool* → |ff4| pool*": "siglip",
        "modules: vision_model.head.mlp.fc2 = |joint| ff4* → |joint| |ff4|*": "siglip",
        "modules: vocab_transform = mlm n4* → |mlm| n4*": "distilbert",
        "tensors: attention.attention.relative_position_bias.relative_position_bias_table = .28 heads{i} → .28 |heads{i}|": "beit",
        "tensors: data2vec_text.embeddings.word_embeddings.weight = .30 resid & .30 t* → .30 |resid| & .30 t*": "data2vec-text",
        "tensors: decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight = .8 heads2 → .8 |heads2|": "umt5",
        "tensors: distilbert.embeddings.word_embeddings.weight = .30 resid & .30 t* → .30 |resid| & .30 t*": "distilbert",
        "tensors: encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight = .8 heads0 → .8 |heads0|": "umt5",
        "tensors: ernie.embeddings.word_embeddings.weight = .30 resid & .30 t* → .30 |resid| & .30 t*": "ernie",
        "tensors: model.decoder.embed_tokens.weight = .30 dec & .30 f* → .30 |dec| & .30 f*": "whisper",
        "tensors: model.embeddings.tok_embeddings.weight = .30 resid & .30 t* → .30 |resid| & .30 t*": "modernbert",
        "tensors: model.encoder.conv1.bias = conv → |conv|": "whisper",
        "tensors: model.encoder.conv1.weight = conv .5 .3 → |conv| .5 .3": "whisper",
        "tensors: model.encoder.conv2.weight = |enc| conv* .3 → |enc| |conv|* .3": "whisper",
        "tensors: model.layers.0.mlp.gate.e_score_correction_bias = experts0 → |experts0|": "deepseek_v3",
        "tensors: model.layers.1.mlp.gate.e_score_correction_bias = experts1 → |experts1|": "deepseek_v3",
        "tensors: mpnet.embeddings.word_embeddings.weight = .30 resid & .30 t* → .30 |resid| & .30 t*": "mpnet",
        "tensors: nomic_bert.embeddings.word_embeddings.weight = .30 resid & .30 t* → .30 |resid| & .30 t*": "nomic_bert",
        "tensors: roberta.embeddings.word_embeddings.weight = .30 resid & .30 t* → .30 |resid| & .30 t*": "camembert roberta xlm-roberta",
        "tensors: shared.weight = .30 resid → .30 |resid|": "t5",
    },
    OPTIONAL: {
        "aliases: lm_head.weight left out": "mt5 t5 umt5",
        "aliases: proj_out.weight left out": "whisper",
        "modules: deit.pooler.dense = ?. f* → . f*": "deit",
        "modules: roberta.pooler.dense = ?.24 n4* → .24 n4*": "roberta",
        "tensors: cls.predictions.bias = ?.30 → .30": "ernie nomic_bert",
        "tensors: decoder.bias = ?.30 → .30": "modernbert",
        "tensors: dinov2.embeddings.mask_token = ?.1 resid → .1 resid": "dinov2",
        "tensors: final_logits_bias = ?.1 .30 → .1 .30": "bart mbart",
        "tensors: lm_head.bias = ?.30 → .30": "camembert data2vec-text mpnet roberta xlm-roberta",
        "tensors: vocab_projector.bias = ?.30 → .30": "distilbert",
    },
    UNREAD: {
        "norms: f = rms(resid, exposed) → layer": "t5",
        "norms: f = rms(resid, exposed) → nothing": "t5",
        "norms: f = rms(resid, exposed) → plus_one": "t5",
        "tensors: shared.weight = .30 resid → .30 .": "t5",
    },
    NO_ROTARY: {
        "heads: cross2, interleaved=True": "bart mbart mt5 t5 umt5 whisper",
        "heads: heads0, interleaved=True": (
            "bart clip clip_text_model clip_vision_model mbart mt5 siglip_text_model t5 umt5 whisper"
        ),
        "heads: interleaved=True": (
            "beit biogpt bloom camembert data2vec-text deit dinov2 distilbert ernie gpt_bigcode gpt_neo "
            "mpnet mpt opt roberta xlm-roberta"
        ),
    },
    NO_GROUPS: {
        "modules: attention.attention.key = qk{i} a{i}* → qk{i}:q a{i}*": "beit deit dinov2",
        "modules: attention.attention.query = qk{i}* a{i}* → qk{i}:q* a{i}*": "beit deit dinov2",
        "modules: attention.attention.value = vo{i} a{i}* → vo{i}:q a{i}*": "beit deit dinov2",
        "modules: attention.attn.k = qk{i} n{2i}* → qk{i}:q n{2i}*": "mpnet",
        "modules: attention.attn.o = resid vo{i}* → resid vo{i}:q*": "mpnet",
        "modules: attention.attn.q = qk{i}* n{2i}* → qk{i}:q* n{2i}*": "mpnet",
        "modules: attention.attn.v = vo{i} n{2i}* → vo{i}:q n{2i}*": "mpnet",
        "modules: attention.k_lin = qk{i} n{2i}* → qk{i}:q n{2i}*": "distilbert",
        "modules: attention.out_lin = resid vo{i}* → resid vo{i}:q*": "distilbert",
        "modules: attention.output.dense = resid vo{i}* → resid vo{i}:q*": (
            "beit camembert data2vec-text deit dinov2 ernie roberta xlm-roberta"
        ),
        "modules: attention.q_lin = qk{i}* n{2i}* → qk{i}:q* n{2i}*": "distilbert",
        "modules: attention.self.key = qk{i} n{2i}* → qk{i}:q n{2i}*": (
            "camembert data2vec-text ernie roberta xlm-roberta"
        ),
        "modules: attention.self.query = qk{i}* n{2i}* → qk{i}:q* n{2i}*": (
            "camembert data2vec-text ernie roberta xlm-roberta"
        ),
        "modules: attention.self.value = vo{i} n{2i}* → vo{i}:q n{2i}*": (
            "camembert data2vec-text ernie roberta xlm-roberta"
        ),
        "modules: attention.v_lin = vo{i} n{2i}* → vo{i}:q n{2i}*": "distilbert",
        "modules: attn.Wo = resid vo{i}* → resid vo{i}:q*": "modernbert",
        "modules: attn.Wqkv = qk{i}*+qk{i}+vo{i} a{i}* → qk{i}*+qk{i}+vo{i}:q a{i}*": "modernbert mpt",
        "modules: attn.Wqkv = qk{i}*+qk{i}+vo{i} a{i}* → qk{i}*+qk{i}:q+vo{i} a{i}*": "modernbert mpt",
        "modules: attn.Wqkv = qk{i}*+qk{i}+vo{i} a{i}* → qk{i}:q*+qk{i}+vo{i} a{i}*": "modernbert mpt",
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
        "modules: model.decoder.layers.0.encoder_attn.k_proj = xqk2 e* → xqk2:q e*": "mbart whisper",
        "modules: model.decoder.layers.0.encoder_attn.k_proj = xqk2 o1* → xqk2:q o1*": "bart",
        "modules: model.decoder.layers.0.encoder_attn.out_proj = dec xvo2* → dec xvo2:q*": "whisper",
        "modules: model.decoder.layers.0.encoder_attn.out_proj = resid xvo2* → resid xvo2:q*": "bart mbart",
        "modules: model.decoder.layers.0.encoder_attn.q_proj = xqk2* c2* → xqk2:q* c2*": "mbart whisper",
        "modules: model.decoder.layers.0.encoder_attn.q_proj = xqk2* s2* → xqk2:q* s2*": "bart",
        "modules: model.decoder.layers.0.encoder_attn.v_proj = xvo2 e* → xvo2:q e*": "mbart whisper",
        "modules: model.decoder.layers.0.encoder_attn.v_proj = xvo2 o1* → xvo2:q o1*": "bart",
        "modules: model.decoder.layers.0.self_attn.k_proj = qk2 a2* → qk2:q a2*": "mbart whisper",
        "modules: model.decoder.layers.0.self_attn.k_proj = qk2 n_decoder* → qk2:q n_decoder*": "bart",
        "modules: model.decoder.layers.0.self_attn.out_proj = dec vo2* → dec vo2:q*": "whisper",
        "modules: model.decoder.layers.0.self_attn.out_proj = resid vo2* → resid vo2:q*": "bart mbart",
        "modules: model.decoder.layers.0.self_attn.q_proj = qk2* a2* → qk2:q* a2*": "mbart whisper",
        "modules: model.decoder.layers.0.self_attn.q_proj = qk2* n_decoder* → qk2:q* n_decoder*": "bart",
        "modules: model.decoder.layers.0.self_attn.v_proj = vo2 a2* → vo2:q a2*": "mbart whisper",
        "modules: model.decoder.layers.0.self_attn.v_proj = vo2 n_decoder* → vo2:q n_decoder*": "bart",
        "modules: model.decoder.layers.1.self_attn.k_proj = qk3 o2* → qk3:q o2*": "bart",
        "modules: model.decoder.layers.1.self_attn.q_proj = qk3* o2* → qk3:q* o2*": "bart",
        "modules: model.decoder.layers.1.self_attn.v_proj = vo3 o2* → vo3:q o2*": "bart",
        "modules: model.encoder.layers.0.self_attn.k_proj = qk0 a0* → qk0:q a0*": "mbart whisper",
        "modules: model.encoder.layers.0.self_attn.k_proj = qk0 n_encoder* → qk0:q n_encoder*": "bart",
        "modules: model.encoder.layers.0.self_attn.out_proj = enc vo0* → enc vo0:q*": "whisper",
        "modules: model.encoder.layers.0.self_attn.out_proj = resid vo0* → resid vo0:q*": "bart mbart",
        "modules: model.encoder.layers.0.self_attn.q_proj = qk0* a0* → qk0:q* a0*": "mbart whisper",
        "modules: model.encoder.layers.0.self_attn.q_proj = qk0* n_encoder* → qk0:q* n_encoder*": "bart",
        "modules: model.encoder.layers.0.self_attn.v_proj = vo0 a0* → vo0:q a0*": "mbart whisper",
        "modules: model.encoder.layers.0.self_attn.v_proj = vo0 n_encoder* → vo0:q n_encoder*": "bart",
        "modules: model.encoder.layers.1.self_attn.k_proj = qk1 o0* → qk1:q o0*": "bart",
        "modules: model.encoder.layers.1.self_attn.q_proj = qk1* o0* → qk1:q* o0*": "bart",
        "modules: model.encoder.layers.1.self_attn.v_proj = vo1 o0* → vo1:q o0*": "bart",
        "modules: self_attention.dense = resid vo{i}* → resid vo{i}:q*": "bloom",
        "modules: self_attention.query_key_value = (qk{i}*+qk{i}+vo{i}) a{i}* → (qk{i}*+qk{i}+vo{i}:q) a{i}*": "bloom",
        "modules: self_attention.query_key_value = (qk{i}*+qk{i}+vo{i}) a{i}* → (qk{i}*+qk{i}:q+vo{i}) a{i}*": "bloom",
        "modules: self_attention.query_key_value = (qk{i}*+qk{i}+vo{i}) a{i}* → (qk{i}:q*+qk{i}+vo{i}) a{i}*": "bloom",
        "modules: self_attn.k_proj = qk{i} a{i}* → qk{i}:q a{i}*": "biogpt opt",
        "modules: self_attn.kv_b_proj = (qk{i}+vo{i}) kvn{i}* → (qk{i}+vo{i}:q) kvn{i}*": "deepseek_v2 deepseek_v3",
        "modules: self_attn.kv_b_proj = (qk{i}+vo{i}) kvn{i}* → (qk{i}:q+vo{i}) kvn{i}*": "deepseek_v2 deepseek_v3",
        "modules: self_attn.o_proj = resid vo{i}:q* → resid vo{i}*": "deepseek_v2 deepseek_v3",
        "modules: self_attn.out_proj = resid vo{i}* → resid vo{i}:q*": "biogpt opt",
        "modules: self_attn.q_b_proj = (qk{i}:q*+rope{i}:q*) qn{i}* → (qk{i}*+rope{i}:q*) qn{i}*": "deepseek_v2 deepseek_v3",
        "modules: self_attn.q_proj = (qk{i}:q*+rope{i}:q*) a{i}* → (qk{i}*+rope{i}:q*) a{i}*": "deepseek_v2 deepseek_v3",
        "modules: self_attn.q_proj = qk{i}* a{i}* → qk{i}:q* a{i}*": "biogpt opt",
        "modules: self_attn.v_proj = vo{i} a{i}* → vo{i}:q a{i}*": "biogpt opt",
        "modules: text_model.encoder.layers.0.self_attn.k_proj = qk0 a0* → qk0:q a0*": (
            "clip clip_text_model siglip siglip_text_model"
        ),
        "modules: text_model.encoder.layers.0.self_attn.out_proj = text vo0* → text vo0:q*": (
            "clip clip_text_model siglip siglip_text_model"
        ),
        "modules: text_model.encoder.layers.0.self_attn.q_proj = qk0* a0* → qk0:q* a0*": (
            "clip clip_text_model siglip siglip_text_model"
        ),
        "modules: text_model.encoder.layers.0.self_attn.v_proj = vo0 a0* → vo0:q a0*": (
            "clip clip_text_model siglip siglip_text_model"
        ),
        "modules: vision_model.encoder.layers.0.self_attn.k_proj = qk0 a0* → qk0:q a0*": "clip_vision_model siglip_vision_model",
        "modules: vision_model.encoder.layers.0.self_attn.k_proj = qk2 a2* → qk2:q a2*": "clip siglip",
        "modules: vision_model.encoder.layers.0.self_attn.out_proj = vision vo0* → vision vo0:q*": "siglip_vision_model",
        "modules: vision_model.encoder.layers.0.self_attn.out_proj = vision vo2* → vision vo2:q*": "clip siglip",
        "modules: vision_model.encoder.layers.0.self_attn.out_proj = |vision| vo0* → |vision| vo0:q*": "clip_vision_model",
        "modules: vision_model.encoder.layers.0.self_attn.q_proj = qk0* a0* → qk0:q* a0*": "clip_vision_model siglip_vision_model",
        "modules: vision_model.encoder.layers.0.self_attn.q_proj = qk2* a2* → qk2:q* a2*": "clip siglip",
        "modules: vision_model.encoder.layers.0.self_attn.v_proj = vo0 a0* → vo0:q a0*": "clip_vision_model siglip_vision_model",
        "modules: vision_model.encoder.layers.0.self_attn.v_proj = vo2 a2* → vo2:q a2*": "clip siglip",
        "modules: vision_model.head.attention.k_proj = qk2 vision_last* → qk2:q vision_last*": "siglip_vision_model",
        "modules: vision_model.head.attention.k_proj = qk4 vision_last* → qk4:q vision_last*": "siglip",
        "modules: vision_model.head.attention.out_proj = |joint| vo2* → |joint| vo2:q*": "siglip_vision_model",
        "modules: vision_model.head.attention.out_proj = |joint| vo4* → |joint| vo4:q*": "siglip",
        "modules: vision_model.head.attention.q_proj = qk2* probe* → qk2:q* probe*": "siglip_vision_model",
        "modules: vision_model.head.attention.q_proj = qk4* probe* → qk4:q* probe*": "siglip",
        "modules: vision_model.head.attention.v_proj = vo2 vision_last* → vo2:q vision_last*": "siglip_vision_model",
        "modules: vision_model.head.attention.v_proj = vo4 vision_last* → vo4:q vision_last*": "siglip",
        "tensors: decoder.block.0.layer.0.SelfAttention.k.weight = qk2 a2* → qk2:q a2*": "mt5 umt5",
        "tensors: decoder.block.0.layer.0.SelfAttention.o.weight = resid vo2* → resid vo2:q*": "mt5 umt5",
        "tensors: decoder.block.0.layer.0.SelfAttention.q.weight = qk2* a2* → qk2:q* a2*": "mt5 umt5",
        "tensors: decoder.block.0.layer.0.SelfAttention.v.weight = vo2 a2* → vo2:q a2*": "mt5 umt5",
        "tensors: decoder.block.0.layer.1.EncDecAttention.k.weight = xqk2 e* → xqk2:q e*": "mt5 umt5",
        "tensors: decoder.block.0.layer.1.EncDecAttention.o.weight = resid xvo2* → resid xvo2:q*": "mt5 umt5",
        "tensors: decoder.block.0.layer.1.EncDecAttention.q.weight = xqk2* c2* → xqk2:q* c2*": "mt5 umt5",
        "tensors: decoder.block.0.layer.1.EncDecAttention.v.weight = xvo2 e* → xvo2:q e*": "mt5 umt5",
        "tensors: encoder.block.0.layer.0.SelfAttention.k.weight = qk0 a0* → qk0:q a0*": "mt5 umt5",
        "tensors: encoder.block.0.layer.0.SelfAttention.o.weight = resid vo0* → resid vo0:q*": "mt5 umt5",
        "tensors: encoder.block.0.layer.0.SelfAttention.q.weight = qk0* a0* → qk0:q* a0*": "mt5 umt5",
        "tensors: encoder.block.0.layer.0.SelfAttention.v.weight = vo0 a0* → vo0:q a0*": "mt5 umt5",
    },
    TIED_NORM: {
        "norms: f = rms(resid) → exposed": "mt5 umt5",
        "norms: f = rms(resid) → layer": "mt5 umt5",
        "norms: f = rms(resid) → plus_one": "mt5 umt5",
        "norms: f = rms(resid, plus_one) → exposed": "gemma3",
        "norms: f = rms(resid, plus_one) → layer": "gemma3",
        "norms: f = rms(resid, plus_one) → nothing": "gemma3",
        "norms: o2 = layer(resid) → exposed": "bart",
        "norms: o2 = layer(resid) → plus_one": "bart",
        "norms: o2 = layer(resid) → skip=model.decoder.layers.0.encoder_attn.out_proj": "bart",
        "norms: o2 = layer(resid) → skip=model.decoder.layers.0.fc2": "bart",
        "norms: o2 = layer(resid) → skip=model.decoder.layers.0.self_attn.out_proj": "bart",
        "norms: o2 = layer(resid) → skip=model.encoder.layers.0.fc2": "bart",
        "norms: o2 = layer(resid) → skip=model.encoder.layers.0.self_attn.out_proj": "bart",
        "norms: o2 = layer(resid) → skip=model.encoder.layers.1.fc2": "bart",
        "norms: o2 = layer(resid) → skip=model.encoder.layers.1.self_attn.out_proj": "bart",
        "norms: t = layer(resid) → plus_one": "modernbert",
    },
    SIDES: {
        "sums: class, turned round": "clip clip_vision_model",
        "sums: cls, turned round": "beit deit dinov2",
        "sums: distillation_token, turned round": "deit",
        "sums: out0, turned round": "falcon phi",
        "sums: patches, turned round": "dinov2 siglip siglip_vision_model",
        "sums: positions, turned round": (
            "clip clip_text_model distilbert gpt_bigcode gpt_neo mpnet opt siglip siglip_text_model"
        ),
        "sums: types, turned round": "camembert data2vec-text ernie nomic_bert roberta xlm-roberta",
    },
    ONE_ROW: {
        "sums: class, give the first row of vision_model.embeddings.class_embedding": "clip clip_vision_model",
        "sums: cls, give the first row of beit.embeddings.cls_token": "beit",
        "sums: cls, give the first row of deit.embeddings.cls_token": "deit",
        "sums: cls, give the first row of dinov2.embeddings.cls_token": "dinov2",
        "sums: distillation_token, give the first row of deit.embeddings.distillation_token": "deit",
        "sums: out0, give the first row of model.layers.0.self_attn.dense.bias": "phi",
        "sums: out0, give the first row of transformer.h.0.self_attention.dense.bias": "falcon",
        "sums: out0, take the first row of model.layers.0.mlp.fc2.bias": "phi",
        "sums: out0, take the first row of transformer.h.0.mlp.dense_4h_to_h.bias": "falcon",
        "sums: patches, give the first row of beit.embeddings.mask_token": "beit",
        "sums: patches, give the first row of beit.embeddings.patch_embeddings.projection.bias": "beit",
        "sums: patches, give the first row of deit.embeddings.mask_token": "deit",
        "sums: patches, give the first row of deit.embeddings.patch_embeddings.projection.bias": "deit",
        "sums: patches, give the first row of dinov2.embeddings.mask_token": "dinov2",
        "sums: patches, give the first row of dinov2.embeddings.patch_embeddings.projection.bias": "dinov2",
        "sums: patches, give the first row of vision_model.embeddings.patch_embedding.bias": "siglip siglip_vision_model",
        "sums: words, give the first row of nomic_bert.embeddings.word_embeddings.weight": "nomic_bert",
        "sums: words, take the first row of nomic_bert.embeddings.token_type_embeddings.weight": "nomic_bert",
    },
    DUAL_HEADS: {
        "modules: attn.Wqkv = qk{i}*+qk{i}+vo{i} a{i}* → qk{i}+qk{i}*+vo{i} a{i}*": "modernbert mpt",
        "modules: attn.Wqkv = qk{i}*+qk{i}+vo{i} n{2i}* → qk{i}+qk{i}*+vo{i} n{2i}*": "nomic_bert",
    },
    FIXED: {
        "modules: vision_model.encoder.layers.0.mlp.fc2 = vision ff0* → joint ff0*": "siglip_vision_model",
        "modules: vision_model.encoder.layers.0.mlp.fc2 = |vision| ff0* → . ff0*": "clip_vision_model",
        "modules: vision_model.encoder.layers.0.self_attn.out_proj = vision vo0* → joint vo0*": "siglip_vision_model",
        "modules: vision_model.encoder.layers.0.self_attn.out_proj = |vision| vo0* → . vo0*": "clip_vision_model",
        "modules: vision_model.head.attention.out_proj = |joint| vo2* → . vo2*": "siglip_vision_model",
        "modules: vision_model.head.attention.out_proj = |joint| vo2* → |probe| vo2*": "siglip_vision_model",
        "modules: vision_model.head.attention.out_proj = |joint| vo2* → |vision| vo2*": "siglip_vision_model",
        "modules: vision_model.head.attention.out_proj = |joint| vo4* → . vo4*": "siglip",
        "modules: vision_model.head.attention.out_proj = |joint| vo4* → |probe| vo4*": "siglip",
        "modules: vision_model.head.attention.out_proj = |joint| vo4* → |text| vo4*": "siglip",
        "modules: vision_model.head.attention.out_proj = |joint| vo4* → |vision| vo4*": "siglip",
        "modules: vision_model.head.attention.q_proj = qk2* probe* → qk2* joint*": "siglip_vision_model",
        "modules: vision_model.head.attention.q_proj = qk2* probe* → qk2* vision*": "siglip_vision_model",
        "modules: vision_model.head.attention.q_proj = qk2* probe* → qk2* |probe|*": "siglip_vision_model",
        "modules: vision_model.head.attention.q_proj = qk4* probe* → qk4* joint*": "siglip",
        "modules: vision_model.head.attention.q_proj = qk4* probe* → qk4* |probe|*": "siglip",
        "modules: vision_model.head.mlp.fc2 = |joint| ff2* → . ff2*": "siglip_vision_model",
        "modules: vision_model.head.mlp.fc2 = |joint| ff2* → |probe| ff2*": "siglip_vision_model",
        "modules: vision_model.head.mlp.fc2 = |joint| ff2* → |vision| ff2*": "siglip_vision_model",
        "modules: vision_model.head.mlp.fc2 = |joint| ff4* → . ff4*": "siglip",
        "modules: vision_model.head.mlp.fc2 = |joint| ff4* → |probe| ff4*": "siglip",
        "modules: vision_model.head.mlp.fc2 = |joint| ff4* → |text| ff4*": "siglip",
        "modules: vision_model.head.mlp.fc2 = |joint| ff4* → |vision| ff4*": "siglip",
        "norms: a0 = layer(vision) → joint": "siglip_vision_model",
        "norms: e = layer(enc, exposed) → dec": "whisper",
        "norms: f = layer(dec, exposed) → enc": "whisper",
        "norms: m0 = layer(vision) → joint": "siglip_vision_model",
        "norms: pool = layer(joint) → vision": "siglip_vision_model",
        "norms: vision_last = layer(vision, exposed) → joint": "siglip_vision_model",
        "tensors: text_projection.weight = .7 text_last* → .7 .": "clip_text_model",
        "tensors: vision_model.embeddings.patch_embedding.bias = vision → joint": "siglip_vision_model",
        "tensors: vision_model.embeddings.patch_embedding.bias = vision → probe": "siglip_vision_model",
        "tensors: vision_model.embeddings.patch_embedding.weight = vision .3 .2 .2 → joint .3 .2 .2": "siglip_vision_model",
        "tensors: vision_model.embeddings.position_embedding.weight = .9 vision → .9 joint": "siglip_vision_model",
        "tensors: vision_model.head.probe = .1 .1 probe → .1 .1 .": "siglip siglip_vision_model",
        "tensors: vision_model.head.probe = .1 .1 probe → .1 .1 probe*": "siglip siglip_vision_model",
        "tensors: vision_model.head.probe = .1 .1 probe → .1 .1 |probe|": "siglip siglip_vision_model",
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
    UNREAD_ROWS: {
        "sums: patches, give without beit.embeddings.mask_token": "beit",
        "sums: positions, give all rows of data2vec_text.embeddings.position_embeddings.weight": "data2vec-text",
        "sums: positions, give all rows of mpnet.embeddings.position_embeddings.weight": "mpnet",
        "sums: positions, give all rows of roberta.embeddings.position_embeddings.weight": "camembert roberta xlm-roberta",
        "sums: types, take all rows of data2vec_text.embeddings.position_embeddings.weight": "data2vec-text",
        "sums: types, take all rows of roberta.embeddings.position_embeddings.weight": "camembert roberta xlm-roberta",
        "sums: words, take all rows of data2vec_text.embeddings.position_embeddings.weight": "data2vec-text",
        "sums: words, take all rows of mpnet.embeddings.position_embeddings.weight": "mpnet",
        "sums: words, take all rows of roberta.embeddings.position_embeddings.weight": "camembert roberta xlm-roberta",
    },
    WHOLE: {
        "sums: words, give the first row of data2vec_text.embeddings.word_embeddings.weight": "data2vec-text",
        "sums: words, give the first row of distilbert.embeddings.word_embeddings.weight": "distilbert",
        "sums: words, give the first row of ernie.embeddings.word_embeddings.weight": "ernie",
        "sums: words, give the first row of mpnet.embeddings.word_embeddings.weight": "mpnet",
        "sums: words, give the first row of roberta.embeddings.word_embeddings.weight": "camembert roberta xlm-roberta",
    },
    OTHER_CLASS: {
        "aliases: embed_out.weight left out": "gpt_neox",
        "aliases: lm_head.weight left out": (
            "bloom deepseek_v3 ernie4_5 falcon gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neo "
            "gpt_oss granite llama mixtral nemotron olmo2 olmo3 opt qwen2 qwen2_5_vl qwen2_moe qwen3 "
            "seed_oss smollm3 stablelm starcoder2"
        ),
        "aliases: output_projection.weight left out": "biogpt",
        "tensors: decoder.bias left out": "modernbert",
        "tensors: vocab_projector.bias left out": "distilbert",
    },
    TWICE: {
        "modules: classifier = . f*+f* → . a{i}*+f*": "dinov2",
        "modules: classifier = . f*+f* → . f*+a{i}*": "dinov2",
        "modules: classifier = . f*+f* → . f*+m{i}*": "dinov2",
        "modules: classifier = . f*+f* → . m{i}*+f*": "dinov2",
    },
}
