// What quantizing did to every layer, as a table for people and as JSON.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace flashquant {

struct LayerReport {
  std::string name;
  int64_t n = 0;
  int64_t k = 0;
  int64_t stored_slots = 0;  // null ones included
  int64_t source_bytes = 0;  // as BF16
  int64_t bytes = 0;         // codes, scales, zero points, outliers
  double energy = 0;         // sum of squared weights
  double error_without = 0;  // sum of squared errors, INT4 alone; negative: not known
  double error_with = 0;     // the same with the outliers
  double output_error = -1;  // squared, over the calibration tokens; negative without calibration
  double output_energy = -1;

  double stored_density() const;
  // Square root of error / energy.
  double relative_error_without() const;
  double relative_error_with() const;
  double relative_output_error() const;
};

// Where a run's time went, as the thread sees it that quantizes.
struct QuantizeSeconds {
  double weights = 0;      // waited for
  double calibration = 0;  // forward passes and second moments
  double factors = 0;
  double layers = 0;   // curves, plans, passes
  double results = 0;  // handed to the calibration
  double writing = 0;  // waited for, and what is not a quantized layer
};

struct QuantizeReport {
  int64_t group_size = 0;
  bool symmetric = false;
  std::string method;       // "rtn", "rtn+outliers", "gptq", "gptq+outliers"
  std::string calibration;  // what was used, empty without
  double target_density = 0;
  double threshold = 0;
  int64_t target_bytes = 0;  // of all tensors; 0: not given
  std::string embedding;
  std::string lm_head;
  std::vector<LayerReport> layers;  // quantized ones, in the order of the tensors
  std::vector<std::string> notes;
  int64_t tensor_bytes = 0;  // of the whole output
  // Layers taken over from a run that was killed; not part of the JSON, which is the same without.
  int64_t resumed_layers = 0;
  QuantizeSeconds seconds;  // nor is this

  // All quantized layers as one; its name is "total".
  LayerReport Total() const;
};

// One line per layer and a total, 100 columns at most for usual names.
std::string ReportTable(const QuantizeReport& report);
nlohmann::json ReportJson(const QuantizeReport& report);

}  // namespace flashquant
