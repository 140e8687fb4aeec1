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
  nlohmann::json json = {{"name", layer.name},
                         {"n", layer.n},
                         {"k", layer.k},
                         {"stored_slots", layer.stored_slots},
                         {"stored_density", layer.stored_density()},
                         {"bf16_bytes", layer.source_bytes},
                         {"bytes", layer.bytes},
                         {"relative_error", layer.relative_error_with()}};
  if (layer.error_without >= 0) {
    json["relative_error_without_outliers"] = layer.relative_error_without();
  }
  if (layer.output_error >= 0) json["relative_output_error"] = layer.relative_output_error();
  return json;
}

}  // namespace

double LayerReport::stored_density() const {
  return Ratio(static_cast<double>(stored_slots), static_cast<double>(n) * static_cast<double>(k));
}

double LayerReport::relative_error_without() const {
  return std::sqrt(Ratio(error_without, energy));
}

double LayerReport::relative_error_with() const { return std::sqrt(Ratio(error_with, energy)); }

double LayerReport::relative_output_error() const {
  return std::sqrt(Ratio(std::max(output_error, 0.0), output_energy));
}

LayerReport QuantizeReport::Total() const {
  LayerReport total;
  total.name = "total";
  total.n = 1;
  total.output_error = layers.empty() ? -1 : 0;
  total.output_energy = total.output_error;
  for (const LayerReport& layer : layers) {
    total.k += layer.n * layer.k;
    total.stored_slots += layer.stored_slots;
    total.source_bytes += layer.source_bytes;
    total.bytes += layer.bytes;
    total.energy += layer.energy;
    total.error_without = layer.error_without < 0 ? -1 : total.error_without + layer.error_without;
    total.error_with += layer.error_with;
    // Outputs of different layers have different scales: the total is the mean of the shares.
    if (layer.output_error < 0 || total.output_error < 0) {
      total.output_error = -1;
    } else {
      total.output_error += Ratio(layer.output_error, layer.output_energy);
      total.output_energy += 1;
    }
  }
  return total;
}

std::string ReportTable(const QuantizeReport& report) {
  size_t width = 5;
  for (const LayerReport& layer : report.layers) width = std::max(width, layer.name.size());
  const bool has_output = report.Total().output_error >= 0;
  const bool has_without = report.Total().error_without >= 0;
  std::string text =
      fmt::format("{:<{}}  {:>15}  {:>8}  {:>11}  {:>9}  {:>9}\n", "layer", width, "N x K",
                  "density", "bytes", has_without ? "INT4 err" : "", "error");
  if (has_output) text.replace(text.size() - 1, 1, "  out error\n");
  const auto add = [&](const LayerReport& layer, const std::string& shape) {
    fmt::format_to(std::back_inserter(text), "{:<{}}  {:>15}  {:>7.3f}%  {:>11}  {:>9}  {:>9.5f}",
                   layer.name, width, shape, 100 * layer.stored_density(), layer.bytes,
                   has_without ? fmt::format("{:.5f}", layer.relative_error_without()) : "",
                   layer.relative_error_with());
    if (has_output) {
      fmt::format_to(std::back_inserter(text), "  {:>9.5f}", layer.relative_output_error());
    }
    text += '\n';
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
          {"method", report.method},
          {"calibration", report.calibration},
          {"target_density", report.target_density},
          {"threshold", report.threshold},
          {"target_bytes", report.target_bytes},
          {"embedding", report.embedding},
          {"lm_head", report.lm_head},
          {"tensor_bytes", report.tensor_bytes},
          {"layers", std::move(layers)},
          {"total", std::move(total)},
          {"notes", report.notes}};
}

}  // namespace flashquant
