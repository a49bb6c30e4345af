// Arguments by the names that Python's type checkers read: the stub package/kvferry/_core.pyi is made from them. Names that
// are no module's are aliases in bindings/stub.patterns.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>
#include <utility>

namespace kvferry {

// T, which the stub calls Name::text.
template <class T, class Name>
struct Told : T {
  static constexpr bool nb_typed = true;  // has the caster below, also where T is one of nanobind's objects
  using T::T;
  Told() = default;
  explicit Told(T value) : T(std::move(value)) {}
};

struct BufferName {
  static constexpr auto text = nanobind::detail::const_name("typing_extensions.Buffer");
};
struct IdsName {
  static constexpr auto text = nanobind::detail::const_name("Ids");
};
struct PagesName {
  static constexpr auto text = nanobind::detail::const_name("Pages");
};
struct DigestsName {
  static constexpr auto text = nanobind::detail::const_name("Digests");
};
struct Int64ArrayName {
  static constexpr auto text = nanobind::detail::const_name("NDArray[numpy.int64]");
};
struct Sha256Name {
  static constexpr auto text = nanobind::detail::const_name("Sha256");
};
struct GpuApiName {
  static constexpr auto text = nanobind::detail::const_name("typing.Literal['cuda', 'hip']");
};
struct CopyStrategyName {
  static constexpr auto text = nanobind::detail::const_name("CopyStrategy");
};
struct ListStrategyName {
  static constexpr auto text = nanobind::detail::const_name("typing.Literal['batch', 'loop', 'kernel']");
};
struct CopyOrderName {
  static constexpr auto text = nanobind::detail::const_name("typing.Literal['stream', 'none']");
};

// Read and checked by the function that is given them.
using BufferArgument = Told<nanobind::handle, BufferName>;
using IdsArgument = Told<nanobind::handle, IdsName>;
using PagesArgument = Told<nanobind::handle, PagesName>;
using DigestsArgument = Told<nanobind::handle, DigestsName>;

// A list of ints.
using IntList = nanobind::typed<nanobind::list, int>;

using Integers = Told<nanobind::ndarray<const int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>, Int64ArrayName>;

// Any string; the function refuses what is none of the words.
using Sha256Argument = Told<std::string, Sha256Name>;
using GpuApiArgument = Told<std::string, GpuApiName>;
using CopyStrategyArgument = Told<std::string, CopyStrategyName>;
using ListStrategyArgument = Told<std::string, ListStrategyName>;
using CopyOrderArgument = Told<std::string, CopyOrderName>;

}  // namespace kvferry

namespace nanobind::detail {

template <class T, class Shown>
struct type_caster<kvferry::Told<T, Shown>> {
  using Told = kvferry::Told<T, Shown>;
  NB_TYPE_CASTER(Told, Shown::text)

  bool from_python(handle source, uint32_t flags, cleanup_list* cleanup) noexcept {
    make_caster<T> inner;
    if (!inner.from_python(source, flags, cleanup)) return false;
    value = Told(inner.operator cast_t<T>());
    return true;
  }
};

}  // namespace nanobind::detail
