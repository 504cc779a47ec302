// Binds adamw_flat_ for CUDA tensors.
#include "adamw_flat.h"

#include <vector>

#include "bind.h"

namespace ckptsurgeon {
namespace {

bool is_like(const Tensor& t, const Tensor& other, const Tensor& p, int64_t numel) {
  return t.is_contiguous() && t.numel() == numel && t.scalar_type() == other.scalar_type() &&
         t.get_device_index() == p.get_device_index();
}

bool is_master(const Tensor& t, const Tensor& p, int64_t numel) {
  return t.scalar_type() == ScalarType::Float && is_like(t, t, p, numel);
}

float* floats(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

using Tensors = std::vector<Tensor>;

Tensor adamw_flat_(Tensors p, Tensors m, Tensors v, Tensors g, Tensors out, const Tensor& grad_mul,
                   double lr, double beta1, double beta2, double eps, double weight_decay,
                   int64_t step) {
  const std::size_t count = p.size();
  STD_TORCH_CHECK(count > 0 && m.size() == count && v.size() == count && g.size() == count &&
                      (out.empty() || out.size() == count),
                  "adamw_flat_: p, m, v, g and out must be as many");
  for (std::size_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(is_master(p[i], p[0], p[i].numel()) && is_master(m[i], p[0], p[i].numel()) &&
                        is_master(v[i], p[0], p[i].numel()),
                    "adamw_flat_: p, m and v must be contiguous float32 of one length and device");
    STD_TORCH_CHECK(is_like(g[i], g[0], p[0], p[i].numel()),
                    "adamw_flat_: g must be contiguous, as long as p, on its device, of one format");
    STD_TORCH_CHECK(out.empty() || is_like(out[i], out[0], p[0], p[i].numel()),
                    "adamw_flat_: out must be contiguous, as long as p, on its device, of one format");
  }
  STD_TORCH_CHECK(grad_mul.scalar_type() == ScalarType::Float && grad_mul.numel() == 1 &&
                      grad_mul.get_device_index() == p[0].get_device_index(),
                  "adamw_flat_: grad_mul must be one float32 on the device of p");
  STD_TORCH_CHECK(step >= 1, "adamw_flat_: step counts from 1");
  const OnDevice device(p[0]);
  const Hyper hyper = hyper_of(lr, beta1, beta2, eps, weight_decay, step);
  const Format g_format = format_of(g[0], "adamw_flat_: g");
  const Format out_format = out.empty() ? Format::kFloat : format_of(out[0], "adamw_flat_: out");
  const int multiprocessors = device.multiprocessors();
  Tensor stats =
      torch::stable::new_empty(p[0], {static_cast<int64_t>(count), 6}, ScalarType::Double);
  for (std::size_t first = 0; first < count; first += AdamwTable::kRoom) {
    AdamwTable table;
    for (std::size_t i = first; i < count && table.count < AdamwTable::kRoom; ++i, ++table.count) {
      table.p[table.count] = floats(p[i]);
      table.m[table.count] = floats(m[i]);
      table.v[table.count] = floats(v[i]);
      table.g[table.count] = g[i].const_data_ptr();
      table.out[table.count] = out.empty() ? nullptr : out[i].mutable_data_ptr();
      table.n[table.count] = p[i].numel();
    }
    const int64_t room = partial_sums_of_adamw(table, multiprocessors);
    Tensor partials = torch::stable::new_empty(p[0], {room}, ScalarType::Double);
    check(launch_adamw_flat(table, g_format, out_format,
                            static_cast<const float*>(grad_mul.const_data_ptr()), hyper,
                            static_cast<double*>(partials.mutable_data_ptr()),
                            static_cast<double*>(stats.mutable_data_ptr()) + 6 * first,
                            device.stream()));
  }
  return stats;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ckptsurgeon, CUDA, m) { m.impl("adamw_flat_", TORCH_BOX(&adamw_flat_)); }

}  // namespace ckptsurgeon
