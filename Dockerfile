# syntax=docker/dockerfile:1
# docker build -t kvferry .                                     daemon, statistics
# docker build -t kvferry-workers --build-arg EXTRAS='[workers]' .  reference workers and front end as well
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON_VERSION}-slim
ARG EXTRAS=
ARG TORCH_INDEX=
COPY constraints.txt /tmp/constraints.txt
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c /tmp/constraints.txt \
      "kvferry${EXTRAS} @ file://$(ls /wheels/kvferry-*.whl)" \
    && rm /tmp/constraints.txt
RUN useradd --create-home --uid 10001 kvferry && install -d -o kvferry -m 0700 /run/kvferry
USER kvferry
# front end, decode daemon, prefill daemon, metrics, UCX
EXPOSE 8000 7070 7071 9470 21000-21063
ENTRYPOINT ["kvferry"]
CMD ["--help"]
