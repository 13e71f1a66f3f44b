// What the shared memory of the Hopper backward kernel for wide heads holds, and where, and which columns of the
// gradients each consumer group has; what for is at the head of kernel/backward_hopper_wide.cuh.
#pragma once
#include "../backward/barriers.cuh"
#include "../common/wgmma.cuh"

namespace nvrtc_attn {

template <class Traits>
struct WideBackwardShape {
  using Element = typename Traits::Element;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kBlocks = Traits::kCluster;  // that share a key tile
  static constexpr int kKeys = kBlockN / kBlocks;   // of one block
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr int kStages = Traits::kNumStages;
  static constexpr int kStagesDout = Traits::kNumStagesDout;
  static constexpr int kConsumers = 256;
  static constexpr int kDiagonalWarps = 0;
  static constexpr int kReadersV = 4;  // warps: group 1 alone
  static constexpr int kTilesM = kBlockM / 8;
  static constexpr int kStepsM = kBlockM / 16;
  static constexpr int kTilesD = kHeadDim / 8;
  static constexpr int kTilesDv = kHeadDimV / 8;
  static constexpr int kSlabs = (kHeadDim + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlabsV = (kHeadDimV + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlabsDq = (kSlabs + 1) / 2;  // that one block reads for its half of dQ's columns
  // Of those the first, in the other block's K.
  static NVRTC_ATTN_DEVICE int first_slab_dq(int rank) { return rank * (kSlabs - kSlabsDq); }
  static constexpr int kSlab = 64 * kSlabRowBytes;
  static constexpr int kSlabQ = kSlab;
  static constexpr int kSlabK = kSlab;
  static constexpr int kBytesQ = kSlabs * kSlab;
  static constexpr int kBytesDout = kSlabsV * kSlab;
  static constexpr int kBytesK = kSlabs * kSlab;
  static constexpr int kBytesV = kSlabsV * kSlab;
  static constexpr int kBytesOtherK = kSlabsDq * kSlab;
  static constexpr int kBytesDs = 2 * kSlab;  // this block's keys, the other's
  static constexpr int kBytesStatistic = kBlockM * 4;
  // A bias is read by every thread: the copy engine brings none, and takes no dbias away.
  static constexpr bool kBiasTiles = false;
  static constexpr bool kStoresTiles = false;
  static constexpr int kBytesZeros = 0;
  static constexpr bool kRelays = false;
  static constexpr int kRelayWarps = 0;
  // dV's operand and dS's factor are two things when the score has a derivative or some of P is dropped.
  static constexpr bool kTwoP = Traits::kSoftcap || Traits::kDropout;
  // The order of a turn that wants scores, P and dQ in registers at the same time: see above.
  static constexpr bool kOverlapped = kSlabs + kSlabsV <= 6 && !Traits::kMask && !(Traits::kDropout && Traits::kVarlen);
  // Registers are short: what only the end of a key tile needs is read again.
  static constexpr bool kReadsAgain = kSlabs + kSlabsV > 6 && (Traits::kDropout || Traits::kVarlen);
  // The group that has a whole slab of dQ where there are three; with a mask the other choice spills 16 to 20 bytes.
  static constexpr int kWholeSlabGroup = Traits::kMask ? 0 : 1;

  using BarrierMap = BackwardBarrierMap<kBlocks, kStages, kStagesDout, kBiasTiles>;
  static constexpr int kOffsetV = kBytesK;
  static constexpr int kOffsetOtherK = kOffsetV + kBytesV;
  static constexpr int kOffsetQ = kOffsetOtherK + kBytesOtherK;
  static constexpr int kOffsetDout = kOffsetQ + kStages * kBytesQ;
  static constexpr int kOffsetDs = kOffsetDout + kStagesDout * kBytesDout;
  static constexpr int kOffsetP = kOffsetDs + 2 * kBytesDs;
  static constexpr int kOffsetLse = kOffsetP + (kTwoP ? 2 : 1) * kSlab;
  static constexpr int kOffsetDelta = kOffsetLse + kStages * kBytesStatistic;
  static constexpr int kOffsetTile = kOffsetDelta + kStagesDout * kBytesStatistic;
  static constexpr int kOffsetMail = kOffsetTile + 16;
  static constexpr int kOffsetBarriers = kOffsetMail + 16;
  static constexpr int kBytes = kOffsetBarriers + BarrierMap::kBytes;
  static_assert(kBytes == Traits::kSmemBytes, "smem_bytes of the config and the layout of the kernel differ");

  static_assert(kBlocks == 2, "each block owns half of the keys");
  static_assert(!(Traits::kBiasTiles || Traits::kKeepWords || Traits::kOrdered || Traits::kFused ||
                  Traits::kOneKeyTile),
                "what backward_hopper alone can do");
  static_assert(!(Traits::kSplit && (Traits::kVarlen || Traits::kDropout || Traits::kDbiasStore)),
                "dk and dv of dense sequences, as they are, and no zeros beside them");
  static_assert(kBlockM == 64 && kKeys == 64, "a product has 64 rows");
  static_assert(Traits::kNumThreads == 128 + kConsumers, "two consumer groups");
  static_assert(kStages >= 2, "S of a query tile runs before dK of the one before it");
  static_assert(kSlabs <= 4 && kSlabsV <= 4, "dk and dv fill the registers");
  static_assert(kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "matrix product shapes");
};

// Columns of one gradient that a consumer group owns, whole slabs.
template <int kTiles, int kFirstSlab, int kEndSlab>
struct OwnColumns {
  static constexpr int kFirst = kFirstSlab;
  static constexpr int kCount = (kTiles < 8 * kEndSlab ? kTiles : 8 * kEndSlab) - 8 * kFirstSlab;  // tiles of 8
  static constexpr bool kAny = kEndSlab > kFirstSlab;
  static constexpr int kRegisterTiles = kAny ? kCount : 2;
};

// Columns of dQ that a consumer group computes, all in one slab: a quarter, but of three slabs one group of each block has a whole
// one and the other half of the middle one, so that no product is thrown away. Group 0 has the larger products of dK and S: the
// whole slab there is 3 % slower (D 192, value 128, causal).
template <class Shape, int kGroup>
struct DqColumns {
  static constexpr bool kWhole = Shape::kSlabs == 3 && kGroup == Shape::kWholeSlabGroup;
  static constexpr int kTiles = Shape::kSlabs == 3 ? (kWhole ? 8 : 4) : 2 * Shape::kSlabs;
  static NVRTC_ATTN_DEVICE int first_tile(int rank) {
    if constexpr (Shape::kSlabs == 3) return kWhole ? 16 * rank : 8 + 4 * rank;
    return (2 * rank + kGroup) * kTiles;
  }
};

}  // namespace nvrtc_attn
