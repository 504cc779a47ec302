// What Python sees of the readers in this folder, on any bytes.

#include <cstdlib>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "entries.hpp"
#include "places.hpp"
#include "table.hpp"

namespace py = pybind11;

using namespace shards::python;

PYBIND11_MODULE(_shards, module) {
#ifdef __GLIBC__
  // A block that is freed stays for the next one: pages fresh from the kernel cost more than most of
  // what is done with them.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 64 << 20);
#endif

  module.doc() = "Torch shards: where the values of a pickle stand, its tensors, and the records.";
  module.def("scan", &scan, py::arg("data"), py::kw_only(), py::arg("opcodes"), py::arg("depth"),
             py::arg("integer"), py::arg("name"), py::arg("key"), py::arg("long_keys"),
             "The places of a pickle that keeps all limits and rules; None for any other.");
  py::class_<Places>(module, "Places")
      .def("parts", &Places::parts)
      .def("grown", &Places::grown)
      .def("built", &Places::built)
      .def("memo", &Places::memo)
      .def("alias", &Places::alias)
      .def("numbers", &Places::numbers, py::arg("holder"), py::arg("name"))
      .def("frames", &Places::frames)
      .def("gaps", &Places::gaps)
      .def("puts", &column<&shards::Scan::puts>, py::keep_alive<0, 1>())
      .def("gets", &column<&shards::Scan::gets>, py::keep_alive<0, 1>())
      .def_property_readonly("root", [](const Places& p) { return p.scan().root; })
      .def_property_readonly("stop", [](const Places& p) { return p.scan().stop; })
      .def("shortened", &Places::shortened, py::arg("dtypes"), py::arg("kind"));
  module.def("directory", &directory, py::arg("data"), py::arg("count"), py::arg("offset"),
             "The records of a central directory of plain records; None for any other.");
  py::class_<Entries>(module, "Entries")
      .def("find", &Entries::find)
      .def("names", &Entries::names)
      .def("sums", &Entries::sums, py::arg("tensors"))
      .def("blanks", &Entries::blanks, py::arg("names"), py::arg("sizes"), py::arg("crcs"),
           py::arg("start"), py::arg("hole"))
      .def("redirected", &Entries::redirected, py::arg("names"), py::arg("offsets"),
           py::arg("sizes"), py::arg("crcs"))
      .def("elements", &Entries::elements, py::arg("descriptor"), py::arg("names"),
           py::arg("widths"))
      .def("__len__", &Entries::size)
      .def_property_readonly("folder", &Entries::folder);
  module.def("chunks", &chunks, py::arg("data"), py::kw_only(), py::arg("depth"),
             py::arg("integer"), py::arg("name"),
             "The chunks of a `.metadata` that is just as torch writes it; None for any other.");
  py::class_<Table>(module, "Table")
      .def("names", &Table::names)
      .def("files", &Table::files)
      .def("globals", &Table::globals)
      .def("members", &Table::members)
      .def("wholes", &Table::wholes)
      .def("tuple", &Table::tuple)
      .def("ends", &Table::ends)
      .def("odd_texts", &Table::odd_texts)
      .def("firsts", &table_column<&shards::Chunks::firsts>, py::keep_alive<0, 1>())
      .def("shapes", &table_column<&shards::Chunks::shapes>, py::keep_alive<0, 1>())
      .def("file", &row_column<&shards::Row::file>, py::keep_alive<0, 1>())
      .def("start", &row_column<&shards::Row::start>, py::keep_alive<0, 1>())
      .def("length", &row_column<&shards::Row::length>, py::keep_alive<0, 1>())
      .def("offset", &row_column<&shards::Row::offset>, py::keep_alive<0, 1>())
      .def("first_edit", &Table::first_edit, py::arg("chosen"))
      .def("moved", &Table::moved, py::arg("data"), py::arg("base"), py::arg("chosen"),
           py::arg("places"), py::arg("file"));
}
