#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/types.h"
#include "digests/digest_chain.h"
#include "digests/sha256.h"
#include "digests/tokens.h"

namespace nb = nanobind;

namespace kvferry {
namespace {

constexpr int64_t kMaxPageSize = 65536;

// Work on fewer tokens is over in some 20 us, and a thread that lets the GIL go may wait 5 ms to have it back.
constexpr size_t kReleaseTokens = 4096;

// What a Python caller gives as tokens: a view of its buffer, held as long as this lives, or a copy of its list.
class TokenView {
 public:
  // Null: neither a one-dimensional contiguous buffer of 32 or 64-bit native integers nor a list or tuple of ints in range.
  static std::unique_ptr<TokenView> of(nb::handle object) {
    auto view = std::make_unique<TokenView>();
    const bool taken = PyList_Check(object.ptr()) || PyTuple_Check(object.ptr()) ? view->copy_items(object.ptr())
                                                                                 : view->hold_buffer(object.ptr());
    return taken ? std::move(view) : nullptr;
  }

  TokenView() = default;
  TokenView(const TokenView&) = delete;
  TokenView& operator=(const TokenView&) = delete;
  ~TokenView() {
    if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
  }

  size_t size() const { return tokens_.count; }
  const Tokens& tokens() const { return tokens_; }

  // Tokens [begin, end); ValueError where that is no range in it.
  Tokens part(int64_t begin, int64_t end) const {
    check_range("begin", begin, 0, int64_t(size()));
    check_range("end", end, begin, int64_t(size()));
    return tokens_.part(size_t(begin), size_t(end));
  }

  // `index` is what `narrow` returned for the tokens from `begin` on.
  [[noreturn]] void refuse_token(size_t begin, size_t index) const {
    refuse("tokens[" + std::to_string(begin + index) + "]: " + decimal(tokens_, begin + index) +
           ", must be in [0, 4294967295]");
  }

 private:
  bool copy_items(PyObject* sequence) {
    const Items items(sequence);
    const Py_ssize_t count = items.size();
    copy_.reserve(size_t(count));
    for (Py_ssize_t i = 0; i < count; ++i) {  // runs no Python code: the items stay what they are
      PyObject* item = items[i];
      if (!PyLong_CheckExact(item)) return false;
      int overflow = 0;
      const long long token = PyLong_AsLongLongAndOverflow(item, &overflow);
      if (overflow != 0 || token < 0 || token > 0xffffffffLL) return false;
      copy_.push_back(uint32_t(token));
    }
    tokens_ = {copy_.data(), copy_.size(), TokenWidth::kUint32};
    return true;
  }

  bool hold_buffer(PyObject* object) {
    if (!PyObject_CheckBuffer(object)) return false;
    if (PyObject_GetBuffer(object, &buffer_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
      PyErr_Clear();
      return false;
    }
    if (buffer_.ndim != 1 || buffer_.format == nullptr || (buffer_.itemsize != 4 && buffer_.itemsize != 8)) return false;
    if (reinterpret_cast<uintptr_t>(buffer_.buf) % size_t(buffer_.itemsize) != 0) return false;
    const char* format = buffer_.format[0] == '@' || buffer_.format[0] == '=' ? buffer_.format + 1 : buffer_.format;
    if (format[0] == '\0' || format[1] != '\0') return false;
    const bool is_signed = std::strchr("ilq", format[0]) != nullptr;
    if (!is_signed && std::strchr("ILQ", format[0]) == nullptr) return false;
    tokens_.data = buffer_.buf;
    tokens_.count = size_t(buffer_.len / buffer_.itemsize);
    if (buffer_.itemsize == 4) {
      tokens_.width = is_signed ? TokenWidth::kInt32 : TokenWidth::kUint32;
    } else {
      tokens_.width = is_signed ? TokenWidth::kInt64 : TokenWidth::kUint64;
    }
    return true;
  }

  Py_buffer buffer_{};
  std::vector<uint32_t> copy_;
  Tokens tokens_;
};

// Lets the GIL go for work on that many tokens, if they are many.
class ReleaseForTokens {
 public:
  explicit ReleaseForTokens(size_t tokens) {
    if (tokens >= kReleaseTokens) release_.emplace();
  }

 private:
  std::optional<nb::gil_scoped_release> release_;
};

nb::bytes new_bytes(size_t size) {
  PyObject* made = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(size));
  if (made == nullptr) throw nb::python_error();
  return nb::steal<nb::bytes>(made);
}

uint8_t* content(const nb::bytes& bytes) { return reinterpret_cast<uint8_t*>(PyBytes_AsString(bytes.ptr())); }

nb::bytes narrow_tokens(const TokenView& view, int64_t begin, int64_t end) {
  const Tokens tokens = view.part(begin, end);
  nb::bytes made = new_bytes(tokens.count * sizeof(uint32_t));  // aligned to a pointer, as all of an object is
  size_t wrong;
  {
    const ReleaseForTokens release(tokens.count);
    wrong = narrow(tokens, reinterpret_cast<uint32_t*>(content(made)));
  }
  if (wrong != kNoToken) view.refuse_token(size_t(begin), wrong);
  return made;
}

size_t common_tokens(const TokenView& view, int64_t begin, BufferArgument held) {
  const Tokens tokens = view.part(begin, int64_t(view.size()));
  const Buffer buffer(held, "held", Buffer::Access::kRead);
  const ReleaseForTokens release(tokens.count);
  return common(tokens, reinterpret_cast<const uint32_t*>(buffer.data()), buffer.size() / sizeof(uint32_t));
}

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

nb::bytes sha256(BufferArgument data, const Sha256Argument& implementation) {
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

const uint8_t* checked_parent(const nb::bytes& parent) {
  if (parent.size() != kDigestBytes) {
    refuse("parent: " + std::to_string(parent.size()) + " bytes, must be " + std::to_string(kDigestBytes));
  }
  return content(parent);
}

using PageExtras = nb::typed<nb::dict, int64_t, nb::bytes>;
using DigestsAndRest = nb::typed<nb::tuple, nb::bytes, nb::bytes>;

DigestsAndRest chain(const TokenView& view, const nb::bytes& partial, int64_t page_size, const nb::bytes& parent,
                     const nb::bytes& extra, const PageExtras& page_extras, int64_t first_page,
                     const Sha256Argument& implementation) {
  const Sha256& hash = choose(implementation);
  check_range("page_size", page_size, 1, kMaxPageSize);
  const uint8_t* root = checked_parent(parent);
  const size_t before = partial.size() / sizeof(uint32_t), total = before + view.size();
  const size_t pages = total / size_t(page_size), left = total % size_t(page_size);
  Extras extras;
  extras.common.assign(extra.c_str(), extra.size());
  for (const auto& [page, encoded] : page_extras) {  // copied: the dict may change while the GIL is released
    const int64_t index = nb::cast<int64_t>(page) - first_page;
    if (index < 0 || index >= int64_t(pages)) continue;
    const nb::bytes item = nb::cast<nb::bytes>(encoded);
    extras.by_page[size_t(index)].assign(item.c_str(), item.size());
  }
  nb::bytes digests = new_bytes(pages * kDigestBytes), rest = new_bytes(left * sizeof(uint32_t));
  size_t wrong = kNoToken;
  {
    const ReleaseForTokens release(total);
    std::unique_ptr<uint32_t[]> copy;
    const uint32_t* tokens = static_cast<const uint32_t*>(view.tokens().data);
    if (before != 0 || view.tokens().width != TokenWidth::kUint32) {
      copy.reset(new uint32_t[total]);
      if (before != 0) std::memcpy(copy.get(), content(partial), before * sizeof(uint32_t));
      wrong = narrow(view.tokens(), copy.get() + before);
      tokens = copy.get();
    }
    if (wrong == kNoToken) {
      chain_digests(tokens, pages, size_t(page_size), root, extras, hash, content(digests));
      if (left != 0) std::memcpy(content(rest), tokens + (total - left), left * sizeof(uint32_t));
    }
  }
  if (wrong != kNoToken) view.refuse_token(0, wrong);
  return nb::borrow<DigestsAndRest>(nb::make_tuple(std::move(digests), std::move(rest)));
}

nb::bytes page_digest(const nb::bytes& tokens, const nb::bytes& parent, const nb::bytes& extra) {
  const size_t count = tokens.size() / sizeof(uint32_t);
  check_range("tokens", int64_t(count), 1, kMaxPageSize);
  Extras extras;
  extras.common.assign(extra.c_str(), extra.size());
  nb::bytes digest = new_bytes(kDigestBytes);
  chain_digests(reinterpret_cast<const uint32_t*>(content(tokens)), 1, count, checked_parent(parent), extras,
                choose("auto"), content(digest));
  return digest;
}

}  // namespace

void bind_digests(nb::module_& m) {
  using namespace nb::literals;
  m.attr("MAX_PAGE_SIZE") = kMaxPageSize;
  m.def("sha256_implementations", &implementations, "Names of the SHA-256 forms this processor can run, fastest first.");
  m.def("sha256", &sha256, "data"_a, "implementation"_a = "auto",
        "The digest (32 bytes). ValueError: an implementation that this processor lacks.");
  nb::class_<TokenView>(m, "TokenView", R"(
      A caller's tokens as they are: a buffer, held as long as this lives, or a copy of a list's or tuple's items.)")
      .def_static("of", &TokenView::of, "tokens"_a.none(), nb::sig("def of(tokens: object) -> TokenView | None"), R"(
                  None: not a one-dimensional contiguous buffer of native 32 or 64-bit integers, nor a list or tuple of
                  ints in [0, 2**32).)")
      .def("__len__", &TokenView::size)
      .def("narrow", &narrow_tokens, "begin"_a, "end"_a,
           "Tokens [begin, end) as uint32. ValueError names the first that is not in [0, 2**32).")
      .def("common", &common_tokens, "begin"_a, "held"_a,
           "How many tokens from `begin` on are the same as those of `held` (uint32, aligned); a bad one never is.");
  m.def("chain_digests", &chain, "tokens"_a, "partial"_a, "page_size"_a, "parent"_a, "extra"_a, "page_extras"_a,
        "first_page"_a, "implementation"_a = "auto", R"(
        Digests (32 bytes each) of the full pages of partial + tokens, and the tokens behind the last of them.

        partial, and what is returned: uint32 in the machine's order. extra: third item of each page, encoded as CBOR;
        page_extras: the same for single pages, where this call's first page has index first_page. The GIL is released
        when the tokens are many. ValueError: bad token, page_size or parent out of bounds, implementation that this
        processor lacks.)");
  m.def("page_digest", &page_digest, "tokens"_a, "parent"_a, "extra"_a,
        "Digest of one page of 1 to MAX_PAGE_SIZE tokens (uint32 in the machine's order).");
}

}  // namespace kvferry
