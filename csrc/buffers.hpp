// Views of Python's buffers, held for as long as the object lives. Made and destroyed with the GIL held.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvferry {

namespace nb = nanobind;

class BufferView {
 public:
  // The errors name `field`.
  static BufferView readable(nb::handle object, const char* field) {
    return BufferView(object, field, PyBUF_SIMPLE, "a C-contiguous buffer");
  }
  static BufferView writable(nb::handle object, const char* field) {
    return BufferView(object, field, PyBUF_WRITABLE, "a writable C-contiguous buffer");
  }
  static BufferView typed(nb::handle object, const char* field, const char* wanted) {
    BufferView view(object, field, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT, wanted);
    if (view.view_.ndim != 1) throw nb::type_error((std::string(field) + " must be one-dimensional").c_str());
    return view;
  }

  BufferView(BufferView&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
  BufferView& operator=(BufferView&&) = delete;
  ~BufferView() { PyBuffer_Release(&view_); }  // nothing to do where obj is null

  unsigned char* data() const { return static_cast<unsigned char*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }
  std::size_t itemsize() const { return static_cast<std::size_t>(view_.itemsize); }

  // The one-letter struct format in native byte order, '\0' for anything else.
  char format() const {
    const char* text = view_.format == nullptr ? "B" : view_.format;
    if (text[0] == '@' || text[0] == '=') ++text;
    return text[0] != '\0' && text[1] == '\0' ? text[0] : '\0';
  }

 private:
  BufferView(nb::handle object, const char* field, int flags, const char* wanted) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
      PyErr_Clear();
      throw nb::type_error((std::string(field) + " must be " + wanted).c_str());
    }
  }

  Py_buffer view_{};
};

// Copies the integers out, so that nobody can change them between the check of a bound and its use.
inline std::vector<std::int64_t> integers(nb::handle object, const char* field) {
  static constexpr const char* kWanted = "a one-dimensional array of int64 or uint32";
  const BufferView view = BufferView::typed(object, field, kWanted);
  const char format = view.format();
  const std::size_t count = view.itemsize() == 0 ? 0 : view.size() / view.itemsize();
  if ((format == 'q' || format == 'l') && view.itemsize() == 8) {
    const auto* first = reinterpret_cast<const std::int64_t*>(view.data());
    return {first, first + count};
  }
  if ((format == 'I' || format == 'L') && view.itemsize() == 4) {
    const auto* first = reinterpret_cast<const std::uint32_t*>(view.data());
    return {first, first + count};
  }
  throw nb::type_error((std::string(field) + " must be " + kWanted).c_str());
}

}  // namespace kvferry
