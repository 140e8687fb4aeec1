// Sums are kept, ratios are made when shown, so that the total is the total of the sums.
#include "engine/quantize/quantize_report.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "fmt/format.h"

namespace flashquant {
namespace {

double Ratio(double part, double whole) { return whole > 0 ? part / whole : 0; }

nlohmann::json LayerJson(const LayerReport& layer) {
  return {{"name", layer.name},
          {"n", layer.n},
          {"k", layer.k},
          {"stored_slots", layer.stored_slots},
          {"stored_density", layer.stored_density()},
          {"bf16_bytes", layer.source_bytes},
          {"bytes", layer.bytes},
          {"relative_error_without_outliers", layer.relative_error_without()},
          {"relative_error", layer.relative_error_with()}};
}

}  // namespace

double LayerReport::stored_density() const {
  return Ratio(static_cast<double>(stored_slots), static_cast<double>(n) * static_cast<double>(k));
}

double LayerReport::relative_error_without() const {
  return std::sqrt(Ratio(error_without, energy));
}

double LayerReport::relative_error_with() const { return std::sqrt(Ratio(error_with, energy)); }

LayerReport QuantizeReport::Total() const {
  LayerReport total;
  total.name = "total";
  total.n = 1;
  for (const LayerReport& layer : layers) {
    total.k += layer.n * layer.k;
    total.stored_slots += layer.stored_slots;
    total.source_bytes += layer.source_bytes;
    total.bytes += layer.bytes;
    total.energy += layer.energy;
    total.error_without += layer.error_without;
    total.error_with += layer.error_with;
  }
  return total;
}

std::string ReportTable(const QuantizeReport& report) {
  size_t width = 5;
  for (const LayerReport& layer : report.layers) width = std::max(width, layer.name.size());
  std::string text = fmt::format("{:<{}}  {:>15}  {:>8}  {:>11}  {:>9}  {:>9}\n", "layer", width,
                                 "N x K", "density", "bytes", "INT4 err", "error");
  const auto add = [&](const LayerReport& layer, const std::string& shape) {
    fmt::format_to(std::back_inserter(text),
                   "{:<{}}  {:>15}  {:>7.3f}%  {:>11}  {:>9.5f}  {:>9.5f}\n", layer.name, width,
                   shape, 100 * layer.stored_density(), layer.bytes, layer.relative_error_without(),
                   layer.relative_error_with());
  };
  for (const LayerReport& layer : report.layers) {
    add(layer, fmt::format("{} x {}", layer.n, layer.k));
  }
  const LayerReport total = report.Total();
  add(total, fmt::format("{}", total.k));
  for (const std::string& note : report.notes) text += fmt::format("note: {}\n", note);
  return text;
}

nlohmann::json ReportJson(const QuantizeReport& report) {
  nlohmann::json layers = nlohmann::json::array();
  for (const LayerReport& layer : report.layers) layers.push_back(LayerJson(layer));
  nlohmann::json total = LayerJson(report.Total());
  total.erase("n");
  total.erase("name");
  total["weights"] = total["k"];
  total.erase("k");
  return {{"group_size", report.group_size},
          {"symmetric", report.symmetric},
          {"target_density", report.target_density},
          {"embedding", report.embedding},
          {"lm_head", report.lm_head},
          {"tensor_bytes", report.tensor_bytes},
          {"layers", std::move(layers)},
          {"total", std::move(total)},
          {"notes", report.notes}};
}

}  // namespace flashquant
