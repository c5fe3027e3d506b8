# The same image as `cargo xtask image`, for builds with Docker or podman: two static programs, their bill of materials
# (SBOM) and the licence.
# The build runs on the builder's platform, because compilers take hours under emulation.
FROM --platform=$BUILDPLATFORM docker.io/library/rust:1.95-bookworm AS build
ARG TARGETARCH
# With its sources, the image's own compiler also compiles the eBPF programs: every build of a version uses the same one.
RUN rustup component add rust-src
RUN case "$(dpkg --print-architecture)-$TARGETARCH" in \
    amd64-arm64) packages="gcc-aarch64-linux-gnu libc6-dev-arm64-cross"; target=aarch64-unknown-linux-gnu ;; \
    arm64-amd64) packages="gcc-x86-64-linux-gnu libc6-dev-amd64-cross"; target=x86_64-unknown-linux-gnu ;; \
    *) exit 0 ;; \
    esac \
 && apt-get update && apt-get install -y --no-install-recommends $packages && rustup target add "$target"
WORKDIR /src
COPY . .
RUN cargo xtask image ${TARGETARCH:+--arch "$TARGETARCH"} \
 && mkdir /out && tar -C /out -xf target/image/spillway-*.tar \
 && mkdir /root-of-image && for blob in /out/blobs/sha256/*; do tar -C /root-of-image -xf "$blob" 2>/dev/null || true; done

FROM scratch
LABEL org.opencontainers.image.title=spillway org.opencontainers.image.licenses=Apache-2.0
COPY --from=build /root-of-image/usr /usr
ENTRYPOINT ["/usr/bin/egress-daemon"]
