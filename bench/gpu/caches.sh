#!/usr/bin/env bash
# On a machine with NVIDIA GPUs and a vLLM that was packed for it (packed_vllm.sh): greedy tokens of a pair against one vLLM, for kinds of KV
# caches: latents (MLA), FP8, a draft model's beside the model's. BASE: a folder with a tokenizer and a config.json of Llama's.
#   bash bench/gpu/caches.sh BASE OUTPUT_FOLDER CASE...   one GPU: latent latent-fp8 indexed fp8 e5m2 eagle eagle3 mtp draft
#                                                         two: latent-1:2 latent-2:1 heads-1:2 heads-2:1 experts-dp chaos-2:2 latent-chaos-1:2
# Two at once, each on a GPU: DEVICE, VLLM_LANE (1, 2) and VLLM_CACHES of their own, behind a first run without cases, which unpacks.
# CASE_SECONDS (200): of each case. GREEDY: more flags of greedy.py, for instance --nixl, NixlConnector's pair as well, which takes twice as long.
# ALONE_RANKS (1): of the one vLLM. DTYPE: bfloat16, in which sums of several ranks differ in their last bits, or float32.
# indexed: an indexer and its attention in torch (bench/vllm/programs/latents_in_torch.py), eager.
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
BASE=$1
OUT_DIR=$2
shift 2
source bench/gpu/build.sh
source bench/gpu/packed_vllm.sh
REFERENCES=${REFERENCES:-$OUT_DIR} # of the one vLLM, for cases of the same model, flags and ranks, batch invariant or not, of the same layout
export VLLM_TIE=1e-2 VLLM_BATCH_INVARIANT=${VLLM_BATCH_INVARIANT:-0}
FLAGS="--dtype ${DTYPE:-bfloat16} --no-enforce-eager --kv-cache-memory-bytes 1073741824"

model() { # KIND: its folder
  [ -d "$HOME/models/$1" ] || $PYTHON bench/gpu/models.py "$1" "$BASE" "$HOME/models/$1" >&2
  echo "$HOME/models/$1"
}

tokens() { # CASE KIND 'more flags of vLLM' more of greedy.py's
  local name=${1//:/-} kind=$2 flags=$3 alone=${ALONE_RANKS:-1} folder like
  shift 3
  like=$(printf '%s\n' "$FLAGS $flags" "$alone" "$VLLM_BATCH_INVARIANT" "${VLLM_KV_CACHE_LAYOUT:-}" | cksum | cut -d' ' -f1)
  folder=$(model "$kind")
  export VLLM_BENCH_LOGS=$HOME/logs/$name VLLM_MODEL=$folder VLLM_FLAGS="$FLAGS $flags"
  echo "==== $name"
  timeout "${CASE_SECONDS:-200}" $PYTHON bench/vllm/greedy.py --alone-ranks "$alone" ${GREEDY:-} --pool engine --cases ${CASES:-large small} --conversations "${CHATS:-6}" --turns 4 \
    --reference "$REFERENCES/$kind-$like.json" --output "$OUT_DIR/$name.txt" "$@" 2>&1 | tail -25
  grep -hE "Using .* backend|Unfit|Error" "$VLLM_BENCH_LOGS"/*.log | cut -c1-300 | sort | uniq -c | sort -rn | head -8
  grep -h "Traceback" -A30 "$VLLM_BENCH_LOGS"/*.log | grep -v APIServer | tail -25 | cut -c1-300
}

drafts() { # METHOD KIND 'more of its configuration' TOKENS
  VLLM_DEVICES=${DEVICE:-cuda:0} tokens "$2" "$2" "--speculative-config '{\"method\":\"$1\",$3\"num_speculative_tokens\":$4}'"
}

storm() { # CASE KIND RANKS
  local name=${1//:/-} layout=()
  export VLLM_BENCH_LOGS=$HOME/logs/$name VLLM_MODEL VLLM_FLAGS=$FLAGS
  echo "==== $name"
  VLLM_MODEL=$(model "$2")
  # Ranks of unlike numbers share heads only where these are outermost in a block.
  [ "${3%:*}" = "${3#*:}" ] || layout=(VLLM_KV_CACHE_LAYOUT=HND)
  env "${layout[@]}" VLLM_DEVICES=cuda:0,cuda:1 timeout "${CASE_SECONDS:-200}" $PYTHON bench/vllm/chaos.py --pool engine --ranks "$3" \
    --aborts "${ABORTS:-100}" --restarts "${RESTARTS:-10}" --rank-kills "${RANK_KILLS:-1}" --output "$OUT_DIR/$name.txt" 2>&1 | tail -30
}

for name in "$@"; do
  case $name in
    latent) VLLM_DEVICES=${DEVICE:-cuda:0} tokens latent latent "" ;;
    latent-fp8) VLLM_DEVICES=${DEVICE:-cuda:0} tokens latent-fp8 latent "--kv-cache-dtype fp8_e4m3" ;;
    indexed)
      $PYTHON -m pytest -q -p no:cacheprovider -m gpu tests/connectors/vllm/test_index_kernel.py # where vLLM's own kernel writes an indexer's keys
      VLLM_PROGRAM=latents_in_torch.py VLLM_DEVICES=${DEVICE:-cuda:0} tokens indexed indexed \
        "--enforce-eager --block-size 64 --tokenizer-mode hf" --page-size 64
      ;;
    fp8) VLLM_DEVICES=${DEVICE:-cuda:0} tokens fp8 heads "--kv-cache-dtype fp8_e4m3" ;;
    e5m2) VLLM_DEVICES=${DEVICE:-cuda:0} tokens e5m2 heads "--kv-cache-dtype fp8_e5m2 --attention-backend TRITON_ATTN" ;;
    eagle | eagle3) drafts "$name" "$name" "\"model\":\"$HOME/models/$name-draft\"," 3 ;;
    mtp) drafts mtp mtp "" 1 ;;
    draft) VLLM_DEVICES=${DEVICE:-cuda:0} tokens draft heads "--speculative-config '{\"model\":\"$HOME/models/heads\",\"num_speculative_tokens\":3}'" ;;
    latent-chaos-*) storm "$name" latent "${name#latent-chaos-}" ;;
    latent-*) VLLM_DEVICES=cuda:0,cuda:1 tokens "$name" latent "" --ranks "${name#latent-}" ;;
    heads-*) VLLM_KV_CACHE_LAYOUT=HND VLLM_DEVICES=cuda:0,cuda:1 tokens "$name" heads "" --ranks "${name#heads-}" ;;
    experts-dp) VLLM_DEVICES=cuda:0,cuda:1 tokens experts-dp experts "--enable-expert-parallel" --dp 2 ;;
    chaos-*) storm "$name" heads "${name#chaos-}" ;;
    *) echo "$name: no such case" >&2 ;;
  esac
done
