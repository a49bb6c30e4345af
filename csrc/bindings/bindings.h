// Shared by the files that show the C++ core to Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvferry {

// A contiguous buffer of a Python object, held for the length of a call: nobody can unmap or resize it while the GIL is released.
class Buffer {
 public:
  enum class Access { kRead, kWrite };

  Buffer(nanobind::handle object, const char* field, Access access) {
    const int flags = access == Access::kWrite ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
      nanobind::python_error reason;
      const char* wanted = access == Access::kWrite ? "writable and contiguous" : "contiguous";
      throw nanobind::type_error((std::string(field) + ": not a " + wanted + " buffer: " + reason.what()).c_str());
    }
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() const { return static_cast<uint8_t*>(view_.buf); }
  size_t size() const { return size_t(view_.len); }

 private:
  Py_buffer view_{};
};

// A list or tuple as `PySequence_Fast` gives it. The stable ABI has functions for it alone, which take a nanosecond longer.
class Items {
 public:
  explicit Items(PyObject* sequence) : sequence_(sequence), is_list_(PyList_Check(sequence)) {}

  Py_ssize_t size() const { return is_list_ ? PyList_Size(sequence_) : PyTuple_Size(sequence_); }
  // Borrowed; null in the stable ABI where a list has become shorter meanwhile.
  PyObject* operator[](Py_ssize_t i) const {
#ifdef Py_LIMITED_API
    return is_list_ ? PyList_GetItem(sequence_, i) : PyTuple_GetItem(sequence_, i);
#else
    return PySequence_Fast_GET_ITEM(sequence_, i);
#endif
  }

 private:
  PyObject* sequence_;
  bool is_list_;
};

[[noreturn]] inline void refuse(const std::string& message) { throw nanobind::value_error(message.c_str()); }

// `field`: `value`, must be in [`low`, `high`]
inline void check_range(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  refuse(std::string(field) + ": " + std::to_string(value) + ", must be in [" + std::to_string(low) + ", " +
         std::to_string(high) + "]");
}

void bind_backstop(nanobind::module_& m);
void bind_digests(nanobind::module_& m);
void bind_copies(nanobind::module_& m);
void bind_cuda(nanobind::module_& m);
void bind_host_pages(nanobind::module_& m);
void bind_pool(nanobind::module_& m);
void bind_tree(nanobind::module_& m);

}  // namespace kvferry
