// LayerJournal: the layers that a quantizing run has finished, kept in a folder beside the output,
// so that a run that was killed is taken up where it stopped.
//
// A layer is used again only when everything that its result depends on is the same: options,
// calibration text, the input's files, its own weights. What cannot be read, or is not whole, is
// made again. The folder goes when the output is complete.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/quantize/quantized_matrix.h"

namespace flashquant {

// What the file of a layer holds; nullopt for bytes that are not whole and right.
std::vector<uint8_t> SerializeMatrix(const QuantizedMatrix& matrix);
std::optional<QuantizedMatrix> ParseMatrix(std::span<const uint8_t> bytes);

// Find and Store may run at the same time. A journal never fails a run: without one, or after an
// error such as a full disk, it is simply not there (and has removed its files).
class LayerJournal final {
 public:
  // fingerprint: all that the results depend on besides the layers' weights; with another one than
  // the folder's, the folder is emptied first. A folder that another run holds, or that cannot be
  // made, gives a journal that is off.
  LayerJournal(std::string folder, const std::string& fingerprint);
  // Closes; the files stay.
  ~LayerJournal();
  LayerJournal(const LayerJournal&) = delete;
  LayerJournal& operator=(const LayerJournal&) = delete;

  // The finished result for this layer and these weights, else nullopt.
  std::optional<QuantizedMatrix> Find(const std::string& layer,
                                      std::span<const float> weights) const;
  // Whole after a kill at any time.
  void Store(const std::string& layer, std::span<const float> weights,
             const QuantizedMatrix& matrix);
  // The output is complete: removes the folder.
  void Remove();

  bool is_on() const { return lock_fd_ >= 0; }

 private:
  std::string PathOf(const std::string& layer) const;

  const std::string folder_;
  std::atomic<int> lock_fd_{-1};
};

// Names, sizes and times of change of the files of `path` (a folder, or a single file).
std::string FilesFingerprint(const std::string& path);

}  // namespace flashquant
