# FlashQuant for the CPU.
#
#   docker build -f docker/cpu.Dockerfile -t flashquant:cpu .
#   docker run --rm --read-only -p 127.0.0.1:50051:50051 -p 127.0.0.1:9464:9464 flashquant:cpu
#
# Serves the demo model; another one: -v FOLDER:/models/mine:ro -e FLASHQUANT_MODEL_PATH=/models/mine
# Debian or Ubuntu, both stages from the same release (the package's dependencies are those of the build stage):
#   --build-arg BASE_IMAGE=ubuntu:24.04, or an image made from a root file system of yours.
# bookworm-slim of July 2026. For a newer one: `docker buildx imagetools inspect debian:bookworm-slim` prints its digest.
ARG BASE_IMAGE=debian:bookworm-slim@sha256:7b140f374b289a7c2befc338f42ebe6441b7ea838a042bbd5acbfca6ec875818

FROM ${BASE_IMAGE} AS build
WORKDIR /src/flashquant
# Packages first: this layer stays valid while sources change.
COPY docker/apt-packages.txt docker/apt-packages.txt
COPY deploy/install_packages.sh deploy/install_packages.sh
RUN bash deploy/install_packages.sh package
COPY . .
ARG REVISION=unknown
RUN --mount=type=cache,target=/root/.cache/ccache \
    export CCACHE_BASEDIR=/src/flashquant CCACHE_NOHASHDIR=1 \
 && cmake --preset deb -DFQ_REVISION="${REVISION}" && cmake --build --preset deb && cpack --preset deb \
 && mkdir /packages && mv build/deb/*.deb /packages/ && rm -rf build

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="FlashQuant" \
      org.opencontainers.image.description="gRPC server for text generation with 4-bit language models, CPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# The package alone and what it depends on; nothing of apt stays.
RUN --mount=type=bind,from=build,source=/packages,target=/packages \
    apt-get update -qq \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends /packages/*.deb \
 && apt-get clean \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log \
      /var/log/alternatives.log /var/lib/dpkg/*-old /var/cache/ldconfig/aux-cache

# Inside a container every address is the container's own: who may reach it is said by the ports that are published.
# The health check reads the same variables as the server, so it follows its port and its TLS.
ENV FLASHQUANT_MODEL_PATH=/usr/share/flashquant/demo-model \
    FLASHQUANT_LISTEN_ADDRESS=0.0.0.0:50051 \
    FLASHQUANT_LISTEN_INSECURE_BIND=true \
    FLASHQUANT_METRICS_ADDRESS=0.0.0.0:9464
USER 65532:65532
WORKDIR /
EXPOSE 50051 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["flashquant", "health", "--local", "--timeout", "4"]
ENTRYPOINT ["flashquant"]
CMD ["serve"]
