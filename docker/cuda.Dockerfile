# FlashQuant for NVIDIA GPUs (compute capability 8.0 and later; driver of CUDA 13 or later) and, without one, the CPU.
#
#   docker build -f docker/cuda.Dockerfile -t flashquant:cuda .
#   docker run --rm --read-only --gpus all -p 127.0.0.1:50051:50051 -p 127.0.0.1:9464:9464 flashquant:cuda
#
# The CUDA runtime is linked statically; of the toolkit only cuBLAS is shipped (some 600 MB, for prompts longer than 64
# tokens). libcuda comes from the driver through the NVIDIA container toolkit. Another model: as in cpu.Dockerfile.
#   --build-arg BUILD_IMAGE=...            anything with the toolkit in /usr/local/cuda
#   --build-arg BASE_IMAGE=...             same release of Debian or Ubuntu as BUILD_IMAGE
#   --build-arg CUDA_ARCHITECTURES=86      one card only: a smaller image, built sooner
# ubuntu:24.04 of July 2026. For a newer one: `docker buildx imagetools inspect ubuntu:24.04` prints its digest.
ARG BUILD_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04@sha256:7d2f6a8c2071d911524f95061a0db363e24d27aa51ec831fcccf9e76eb72bc92
ARG BASE_IMAGE=ubuntu:24.04@sha256:4fbb8e6a8395de5a7550b33509421a2bafbc0aab6c06ba2cef9ebffbc7092d90

FROM ${BUILD_IMAGE} AS build
ARG CUDA_ARCHITECTURES="80;86;89;90;120"
WORKDIR /src/flashquant
COPY docker/apt-packages.txt docker/apt-packages.txt
COPY deploy/install_packages.sh deploy/install_packages.sh
RUN bash deploy/install_packages.sh package
COPY . .
ARG REVISION=unknown
RUN --mount=type=cache,target=/root/.cache/ccache \
    export PATH="/usr/local/cuda/bin:${PATH}" CCACHE_BASEDIR=/src/flashquant CCACHE_NOHASHDIR=1 \
 && cmake --preset cuda-deb -DCMAKE_CUDA_ARCHITECTURES="${CUDA_ARCHITECTURES}" -DFQ_REVISION="${REVISION}" \
 && cmake --build --preset cuda-deb \
 && cpack --preset cuda-deb \
 && mkdir -p /packages /cublas && mv build/cuda-deb/*.deb /packages/ && rm -rf build \
 && cp -L /usr/local/cuda/lib64/libcublas.so.[0-9][0-9] /usr/local/cuda/lib64/libcublasLt.so.[0-9][0-9] /cublas/

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="FlashQuant" \
      org.opencontainers.image.description="gRPC server for text generation with 4-bit language models, CUDA" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /cublas/ /usr/local/lib/
RUN --mount=type=bind,from=build,source=/packages,target=/packages \
    apt-get update -qq \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends /packages/*.deb \
 && ldconfig \
 && apt-get clean \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log \
      /var/log/alternatives.log /var/lib/dpkg/*-old /var/cache/ldconfig/aux-cache

# As in cpu.Dockerfile; `utility` brings NVML.
ENV FLASHQUANT_MODEL_PATH=/usr/share/flashquant/demo-model \
    FLASHQUANT_LISTEN_ADDRESS=0.0.0.0:50051 \
    FLASHQUANT_LISTEN_INSECURE_BIND=true \
    FLASHQUANT_METRICS_ADDRESS=0.0.0.0:9464 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
WORKDIR /
EXPOSE 50051 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["flashquant", "health", "--local", "--timeout", "4"]
ENTRYPOINT ["flashquant"]
CMD ["serve"]
