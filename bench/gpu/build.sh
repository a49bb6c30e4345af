# Sourced by the scripts beside it, in the repository's root: builds the core, lays out a folder from which kvferry is
# imported, and has PYTHON use it. Takes PYTHON, OUT_DIR; wheels are those of build/gpu-wheels, if it is there.
BUILD=build/gpu-core
SITE=$PWD/build/gpu-site
mkdir -p "$OUT_DIR" "$BUILD" "$SITE/kvferry"

if compgen -G "build/gpu-wheels/*.whl" >/dev/null; then
  $PYTHON -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" build/gpu-wheels/*.whl || exit 1
fi
$PYTHON -m cmake --version >/dev/null 2>&1 && CMAKE="$PYTHON -m cmake" || CMAKE=cmake
{
  $CMAKE -S . -B "$BUILD" -Dnanobind_DIR="$($PYTHON -m nanobind --cmake_dir)" -DPython_EXECUTABLE="$($PYTHON -c 'import sys; print(sys.executable)')" &&
    $CMAKE --build "$BUILD" -j "$(nproc)"
} >"$OUT_DIR/build.log" 2>&1 || { tail -30 "$OUT_DIR/build.log"; exit 1; }
for each in */__init__.py; do # each folder of the root with an __init__.py is kvferry.<folder>
  folder=${each%/__init__.py}
  ln -sfn "$PWD/$folder" "$SITE/kvferry/$folder"
done
ln -sf "$PWD"/package/kvferry/* "$PWD/$BUILD"/_core*.so "$SITE/kvferry/"
export PYTHONPATH=$SITE PYTHONUNBUFFERED=1 NIXL_LOG_LEVEL=${NIXL_LOG_LEVEL:-WARN} HF_HUB_OFFLINE=1
