# The same image as `cargo xtask image`, for builds with Docker or podman: two static programs, their bill of materials
# (SBOM) and the licence.
FROM docker.io/library/rust:1.95-bookworm AS build
RUN rustup toolchain install nightly --component rust-src --profile minimal
WORKDIR /src
COPY . .
RUN cargo xtask image \
 && mkdir /out && tar -C /out -xf target/image/spillway-*.tar \
 && mkdir /root-of-image && for blob in /out/blobs/sha256/*; do tar -C /root-of-image -xf "$blob" 2>/dev/null || true; done

FROM scratch
LABEL org.opencontainers.image.title=spillway org.opencontainers.image.licenses=Apache-2.0
COPY --from=build /root-of-image/usr /usr
ENTRYPOINT ["/usr/bin/egress-daemon"]
