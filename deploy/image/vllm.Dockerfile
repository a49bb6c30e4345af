# vLLM with kvferry's connector, and the daemon beside it in the same image:
#   deploy/image/fetch.sh vllm 3.12 && BASE=<an image with vLLM, Python 3.12> deploy/image/build.sh vllm
# kvferry is compiled in a stage of the same base, so that it fits that Python. Nothing that the base has is replaced: pip
# takes from the fetched wheels only what is missing, or older than kvferry needs.
ARG BASE

FROM ${BASE} AS build
USER root
RUN command -v g++ >/dev/null || { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ python3-dev; }
WORKDIR /src
COPY . .
RUN --mount=type=bind,source=wheels,target=/wheels \
    set -eu; \
    version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
    test -d "/wheels/vllm-$version" || { echo "wheels/vllm-$version is not there: deploy/image/fetch.sh vllm $version" >&2; exit 2; }; \
    runner=$(ls /wheels/vllm-$version/build/pip-*.whl)/pip; \
    python3 "$runner" install --no-index --no-deps --target /build-tools $(ls /wheels/vllm-$version/build/*.whl /wheels/vllm-$version/compile/*.whl | grep -v /pip-); \
    PATH=/build-tools/bin:$PATH PYTHONPATH=/build-tools python3 "$runner" wheel --no-index --no-deps --no-build-isolation --wheel-dir /built -C build-dir=/tmp/build .

FROM ${BASE}
USER root
RUN --mount=type=bind,source=wheels,target=/wheels --mount=type=bind,from=build,source=/built,target=/built \
    set -eu; \
    version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
    python3 -m pip install --no-cache-dir --no-index --find-links "/wheels/vllm-$version/runtime" --find-links /built kvferry; \
    python3 -c 'import vllm, kvferry.connectors.vllm.plugin as plugin; plugin.register(); print("vLLM", vllm.__version__)'; \
    install -d -m 0777 /run/kvferry
# The entry point stays the base's. A pod's daemon runs the same image with `command: [kvferry]`.
