#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <vector>

#include "bindings.h"
#include "digest_chain.h"
#include "sha256.h"

namespace nb = nanobind;

namespace kvferry {
namespace {

constexpr int64_t kMaxPageSize = 65536;

using Tokens = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Digests = nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>, nb::c_contig>;

std::vector<std::string> implementations() {
  if (sha256_sha_ni() != nullptr) return {"sha-ni", "portable"};
  return {"portable"};
}

const Sha256& choose(const std::string& implementation) {
  const Sha256* sha_ni = sha256_sha_ni();
  if (implementation == "auto") return sha_ni != nullptr ? *sha_ni : kSha256Portable;
  if (implementation == "portable") return kSha256Portable;
  if (implementation == "sha-ni" && sha_ni != nullptr) return *sha_ni;
  refuse("implementation: '" + implementation + "', must be 'auto' or one of sha256_implementations()");
}

nb::bytes sha256(nb::handle data, const std::string& implementation) {
  const Sha256& hash = choose(implementation);
  const Buffer buffer(data, "data", Buffer::Access::kRead);
  uint8_t digest[kDigestBytes];
  {
    nb::gil_scoped_release release;
    std::vector<uint8_t> message(padded_blocks(buffer.size()) * kBlockBytes);
    if (buffer.size() != 0) std::memcpy(message.data(), buffer.data(), buffer.size());
    Sha256State state;
    hash.begin(state);
    hash.compress(state, message.data(), pad_message(message.data(), buffer.size()));
    hash.finish(state, digest);
  }
  return nb::bytes(digest, sizeof digest);
}

Digests chain(const Tokens& tokens, int64_t page_size, const nb::bytes& parent, const nb::bytes& extra,
              const nb::dict& page_extras, const std::string& implementation) {
  const Sha256& hash = choose(implementation);
  check_range("page_size", page_size, 1, kMaxPageSize);
  if (parent.size() != kDigestBytes) {
    refuse("parent: " + std::to_string(parent.size()) + " bytes, must be " + std::to_string(kDigestBytes));
  }
  Extras extras;
  extras.common.assign(extra.c_str(), extra.size());
  for (const auto& [page, encoded] : page_extras) {  // copied: the dict may change while the GIL is released
    const nb::bytes item = nb::cast<nb::bytes>(encoded);
    extras.by_page[nb::cast<size_t>(page)].assign(item.c_str(), item.size());
  }
  const size_t pages = tokens.size() / size_t(page_size);
  auto digests = std::make_unique<uint8_t[]>(pages * kDigestBytes);
  {
    nb::gil_scoped_release release;
    chain_digests(tokens.data(), pages, size_t(page_size), reinterpret_cast<const uint8_t*>(parent.c_str()), extras, hash,
                  digests.get());
  }
  uint8_t* data = digests.release();
  const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<uint8_t*>(p); });
  return Digests(data, {pages, kDigestBytes}, owner);
}

}  // namespace

void bind_digests(nb::module_& m) {
  using namespace nb::literals;
  m.attr("MAX_PAGE_SIZE") = kMaxPageSize;
  m.def("sha256_implementations", &implementations, "Names of the SHA-256 forms this processor can run, fastest first.");
  m.def("sha256", &sha256, "data"_a, "implementation"_a = "auto");
  m.def("chain_digests", &chain, "tokens"_a, "page_size"_a, "parent"_a, "extra"_a, "page_extras"_a,
        "implementation"_a = "auto",
        "Digests of the full pages of `tokens`, (n, 32). `extra` is the third item of each page, as CBOR, but for the pages "
        "(index in this call) named in `page_extras`.");
}

}  // namespace kvferry
