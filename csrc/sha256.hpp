// SHA-256's compression function in two forms: the x86 SHA extensions, chosen at run time, and portable C++.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry {

constexpr std::size_t kDigestBytes = 32;
constexpr std::size_t kShaBlockBytes = 64;

extern const std::uint32_t kSha256Initial[8];

// Takes `blocks` blocks of 64 bytes into `state`.
using Sha256Compress = void (*)(std::uint32_t state[8], const unsigned char* data, std::size_t blocks);

void sha256_compress_portable(std::uint32_t state[8], const unsigned char* data, std::size_t blocks);

// nullptr where this build or this CPU has no SHA extensions.
Sha256Compress sha256_compress_accelerated();

// The accelerated form if there is one, else the portable one.
Sha256Compress sha256_compress_best();

}  // namespace kvferry
