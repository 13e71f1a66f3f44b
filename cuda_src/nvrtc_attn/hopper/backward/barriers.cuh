// The mbarriers of the two Hopper backward kernels, by name.
//
// `full` counts the bytes of copies, `empty` one arrival for each warp that is done with a slot. Where two thread
// blocks share a key tile (Shape::kBlocks) they bring query rows to both, so that the warps of both give those slots
// back, and they have barriers for what they send each other: half of dS, and the number of the next key tile ("mail").
#pragma once
#include "../common/barrier.cuh"

namespace nvrtc_attn {

// Their places in shared memory; of what has slots, the place of the first. kKeySlots: of K.
template <int kBlocks, int kStages, int kStagesDout, bool kBiasTiles, int kKeySlots = 1>
struct BackwardBarrierMap {
  static constexpr int kMails = kBlocks == 2 ? 1 : 0;
  static constexpr int kSlotsDs = kBlocks == 2 ? 2 : 0;
  static constexpr int kSlotsBias = kBiasTiles ? kStages : 0;
  static constexpr int kRelays = kKeySlots == 2 ? 1 : 0;
  enum Place : int {
    kFullK,
    kEmptyK = kFullK + kKeySlots,
    kFullV = kEmptyK + kKeySlots,
    kEmptyV,
    kFullMail,
    kEmptyMail = kFullMail + kMails,
    kFullDs = kEmptyMail + kMails,
    kEmptyDs = kFullDs + kSlotsDs,
    kFullQ = kEmptyDs + kSlotsDs,
    kEmptyQ = kFullQ + kStages,
    kFullDout = kEmptyQ + kStages,
    kEmptyDout = kFullDout + kStagesDout,
    kFullBias = kEmptyDout + kStagesDout,
    kEmptyBias = kFullBias + kSlotsBias,
    kFullRelay = kEmptyBias + kSlotsBias,
    kEmptyRelay = kFullRelay + kRelays,
    kCount = kEmptyRelay + kRelays,
  };
  static constexpr int kBytes = kCount * Mbarrier::kBytes;
};

template <class Shape>
struct BackwardBarriers {
  using Map = typename Shape::BarrierMap;
  unsigned base;  // shared address

  NVRTC_ATTN_DEVICE Mbarrier full_k(int slot = 0) const { return at(Map::kFullK + slot); }
  NVRTC_ATTN_DEVICE Mbarrier empty_k(int slot = 0) const { return at(Map::kEmptyK + slot); }
  NVRTC_ATTN_DEVICE Mbarrier full_v() const { return at(Map::kFullV); }
  NVRTC_ATTN_DEVICE Mbarrier empty_v() const { return at(Map::kEmptyV); }
  NVRTC_ATTN_DEVICE Mbarrier full_q(int stage) const { return at(Map::kFullQ + stage); }
  NVRTC_ATTN_DEVICE Mbarrier empty_q(int stage) const { return at(Map::kEmptyQ + stage); }
  NVRTC_ATTN_DEVICE Mbarrier full_dout(int stage) const { return at(Map::kFullDout + stage); }
  NVRTC_ATTN_DEVICE Mbarrier empty_dout(int stage) const { return at(Map::kEmptyDout + stage); }
  // kBiasTiles: the slots of dS, while they hold the bias.
  NVRTC_ATTN_DEVICE Mbarrier full_bias(int stage) const { return at(Map::kFullBias + stage); }
  NVRTC_ATTN_DEVICE Mbarrier empty_bias(int stage) const { return at(Map::kEmptyBias + stage); }
  // Two blocks: the other's half of dS has come, and the other has read what this one has sent.
  NVRTC_ATTN_DEVICE Mbarrier full_ds(int slot) const { return at(Map::kFullDs + slot); }
  NVRTC_ATTN_DEVICE Mbarrier empty_ds(int slot) const { return at(Map::kEmptyDs + slot); }
  NVRTC_ATTN_DEVICE Mbarrier full_mail() const { return at(Map::kFullMail); }
  NVRTC_ATTN_DEVICE Mbarrier empty_mail() const { return at(Map::kEmptyMail); }
  // Two slots of K: dk and dv of a key tile are in shared memory, and have left it.
  NVRTC_ATTN_DEVICE Mbarrier full_relay() const { return at(Map::kFullRelay); }
  NVRTC_ATTN_DEVICE Mbarrier empty_relay() const { return at(Map::kEmptyRelay); }

  NVRTC_ATTN_DEVICE void init() const {
    constexpr int kWarps = Shape::kConsumers / 32;
    full_k().init(1);
    full_v().init(1);
    empty_k().init(Map::kRelays > 0 ? Shape::kRelayWarps : kWarps);
    empty_v().init(Shape::kReadersV);
    if constexpr (Map::kRelays > 0) {
      full_k(1).init(1);
      empty_k(1).init(Shape::kRelayWarps);
      full_relay().init(kWarps);
      empty_relay().init(Shape::kRelayWarps);
    }
    if constexpr (Shape::kBlocks == 2) {
      full_mail().init(1);
      empty_mail().init(1);
      for (int slot = 0; slot < Map::kSlotsDs; ++slot) {
        full_ds(slot).init(1);
        empty_ds(slot).init(kWarps);
      }
    }
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      full_q(stage).init(1 + Shape::kDiagonalWarps);
      empty_q(stage).init(Shape::kBlocks * kWarps);
    }
    for (int stage = 0; stage < Shape::kStagesDout; ++stage) {
      full_dout(stage).init(1);
      empty_dout(stage).init(Shape::kBlocks * kWarps);
    }
    if constexpr (Shape::kBiasTiles) {
      for (int stage = 0; stage < Shape::kStages; ++stage) {
        full_bias(stage).init(1);
        empty_bias(stage).init(kWarps);
      }
    }
    fence_barrier_init();
  }

 private:
  NVRTC_ATTN_DEVICE Mbarrier at(int place) const { return {base + Mbarrier::kBytes * place}; }
};

}  // namespace nvrtc_attn
