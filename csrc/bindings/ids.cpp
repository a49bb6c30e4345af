#include "bindings/ids.h"

#include <string>

#include "bindings/bindings.h"
#include "radix/tree_node.h"

namespace nb = nanobind;

namespace kvferry {
namespace {

template <class T>
PageIds widen(const Py_buffer& view, const PagePool& pool) {
  const T* items = static_cast<const T*>(view.buf);
  PageIds ids(size_t(view.len) / sizeof(T));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = checked_page_id(int64_t(items[i]), pool);
  return ids;
}

PageIds read_array(nb::handle object, const PagePool& pool) {
  Py_buffer view;
  if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) throw nb::python_error();
  struct Release {
    Py_buffer& view;
    ~Release() { PyBuffer_Release(&view); }
  } release{view};
  const std::string format = view.format == nullptr ? "B" : view.format;
  const char kind = format.size() == 1 ? format[0] : '?';
  if (view.ndim == 1 && view.itemsize == 4 && (kind == 'i' || kind == 'l')) return widen<int32_t>(view, pool);
  if (view.ndim == 1 && view.itemsize == 4 && (kind == 'I' || kind == 'L')) return widen<uint32_t>(view, pool);
  if (view.ndim == 1 && view.itemsize == 8 && (kind == 'l' || kind == 'q')) return widen<int64_t>(view, pool);
  if (view.ndim == 1 && view.itemsize == 8 && (kind == 'L' || kind == 'Q')) return widen<uint64_t>(view, pool);
  refuse("pages: an array of " + std::to_string(view.ndim) + " dimensions and format '" + format +
         "', must have 1 and hold 32 or 64 bit integers");
}

}  // namespace

uint32_t checked_page_id(int64_t id, const PagePool& pool) {
  if (id >= 0 && id < int64_t(pool.pages())) return uint32_t(id);
  throw nb::index_error(("page is " + std::to_string(id) + "; it must be 0 to " + std::to_string(pool.pages() - 1)).c_str());
}

PageIds read_page_ids(nb::handle object, const PagePool& pool) {
  PyObject* sequence = object.ptr();
  nb::object owned;
  if (!PyList_CheckExact(sequence) && !PyTuple_CheckExact(sequence)) {
    if (PyObject_CheckBuffer(sequence)) return read_array(object, pool);
    owned = nb::steal(PySequence_Fast(sequence, "pages: must be a sequence of integers"));
    if (!owned.is_valid()) throw nb::python_error();
    sequence = owned.ptr();
  }
  const Items items(sequence);
  const size_t count = size_t(items.size());
  PageIds ids(count);
  for (size_t i = 0; i < count; ++i) {
    PyObject* item = items[Py_ssize_t(i)];
    const long long id = item == nullptr ? -1 : PyLong_AsLongLong(item);
    if (id == -1 && PyErr_Occurred()) throw nb::python_error();
    ids[i] = checked_page_id(id, pool);
  }
  return ids;
}

IntList list_of(const PageIds& pages) {
  IntList list = nb::steal<IntList>(PyList_New(Py_ssize_t(pages.size())));
  if (!list.is_valid()) throw nb::python_error();
  for (size_t i = 0; i < pages.size(); ++i) {
    PyObject* id = PyLong_FromUnsignedLong(pages[i]);
    if (id == nullptr) throw nb::python_error();
    if (PyList_SetItem(list.ptr(), Py_ssize_t(i), id) != 0) throw nb::python_error();
  }
  return list;
}

DigestBuffer::DigestBuffer(nb::handle object, const char* field) : field_(field) {
  size_t bytes;
  if (PyBytes_CheckExact(object.ptr())) {  // needs no view
    data_ = reinterpret_cast<const uint8_t*>(PyBytes_AsString(object.ptr()));
    bytes = size_t(PyBytes_Size(object.ptr()));
  } else {
    take_view(object);
    bytes = size_t(view_.len);
  }
  if (bytes % kPageDigestBytes == 0 && bytes / kPageDigestBytes <= UINT32_MAX) {
    count_ = uint32_t(bytes / kPageDigestBytes);
    return;
  }
  if (view_.obj != nullptr) PyBuffer_Release(&view_);
  refuse(std::string(field_) + " has " + std::to_string(bytes) + " bytes; it must be a multiple of " +
         std::to_string(kPageDigestBytes));
}

DigestBuffer::~DigestBuffer() {
  if (view_.obj != nullptr) PyBuffer_Release(&view_);
}

void DigestBuffer::take_view(nb::handle object) {
  if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_FULL_RO) != 0) {
    view_.obj = nullptr;
    throw nb::python_error();
  }
  const std::string format = view_.format == nullptr ? "B" : view_.format;
  const bool bytes = view_.itemsize == 1 && (format == "B" || format == "b" || format == "c");
  PyObject* const it = object.ptr();
  const bool flat = view_.ndim == 1 && (PyBytes_Check(it) || PyByteArray_Check(it) || PyMemoryView_Check(it));
  if (!bytes || !(flat || (view_.ndim == 2 && view_.shape[1] == kPageDigestBytes))) {
    const int dimensions = view_.ndim;
    PyBuffer_Release(&view_);
    refuse(std::string(field_) + " is of format '" + format + "' and " + std::to_string(dimensions) +
           " dimensions; it must be bytes, or uint8 (n, " + std::to_string(kPageDigestBytes) + ")");
  }
  data_ = static_cast<const uint8_t*>(view_.buf);
  if (PyBuffer_IsContiguous(&view_, 'C')) return;
  copied_.resize(size_t(view_.len));
  if (PyBuffer_ToContiguous(copied_.data(), &view_, view_.len, 'C') != 0) {
    PyBuffer_Release(&view_);
    throw nb::python_error();
  }
  data_ = copied_.data();
}

}  // namespace kvferry
