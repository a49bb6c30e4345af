# Sourced in the repository's root behind build.sh, on a GPU machine without a package index: a vLLM that was packed for
# it, in the place of an environment of bench/vllm/venv.sh. PACK, build/vllm-pack: parts/*.tar.xz of its site-packages,
# unpack.sh PARTS SITE, llama_shape.py FOLDER (a model's folder without weights), cache-llama8b.tar.xz (compile caches, the
# folder vc-p). What makes the pack is not in this repository. In an environment with vLLM and kvferry no pack is needed:
# call the scripts of bench/vllm there, with VLLM_PYTHON and VLLM_MODEL.
PACK=${PACK:-build/vllm-pack}
if [ ! -d "$HOME/site/vllm" ]; then
  bash "$PACK/unpack.sh" "$PACK/parts" "$HOME/site" >/dev/null
  $PYTHON "$PACK/llama_shape.py" "$HOME/m8" >/dev/null
  tar -xJf "$PACK/cache-llama8b.tar.xz" -C "$HOME"
  mkdir -p "$HOME/vllm-caches"
  for each in alone prefill decode; do cp -a "$HOME/vc-p" "$HOME/vllm-caches/$each"; done
  for each in "$PACK"/caches-*.tar.xz; do [ ! -e "$each" ] || tar -xJf "$each" -C "$HOME"; done # that ranks.sh has left
fi
export PYTHONPATH=$PYTHONPATH:$HOME/site VLLM_PYTHON=$(command -v "$PYTHON") VLLM_CACHES=${VLLM_CACHES:-$HOME/vllm-caches}
export VLLM_MODEL=${VLLM_MODEL:-$HOME/m8} VLLM_HOST_IP=127.0.0.1 VLLM_USE_FLASHINFER_SAMPLER=0
export VLLM_NIXL_SIDE_CHANNEL_PORT=5600 VLLM_WORKER_MULTIPROC_METHOD=fork UCX_TLS=${UCX_TLS:-cuda_copy,cuda_ipc,sm,self,tcp}
