// What the shared memory of the Hopper forward kernel holds, and where, and its barriers by name; what for is at the
// head of kernel/forward_hopper.cuh.
#pragma once
#include "../common/barrier.cuh"
#include "../common/begun_products.cuh"
#include "../../collective/tile_bits.cuh"
#include "../common/wgmma.cuh"
#include "score_tile.cuh"

namespace nvrtc_attn {

template <class Traits>
struct HopperShape {
  using Element = typename Traits::Element;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kStages = Traits::kNumStages;
  static constexpr int kGroups = kBlockM / 64;
  static constexpr int kConsumers = 128 * kGroups;
  static constexpr int kTilesN = kBlockN / 8;
  static constexpr int kHalfN = kBlockN / 32 * 16;
  static constexpr int kTilesD = Traits::kHeadDimV / 8;
  static constexpr int kStepsN = kBlockN / 16;
  static constexpr int kSlabsQ = (Traits::kHeadDim + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlabsV = (Traits::kHeadDimV + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlabQ = kBlockM * kSlabRowBytes;  // bytes
  static constexpr int kSlabK = kBlockN * kSlabRowBytes;
  static constexpr int kBytesQ = kSlabsQ * kSlabQ;
  static constexpr int kBytesK = kSlabsQ * kSlabK;
  static constexpr int kBytesV = kSlabsV * kSlabK;
  static constexpr int kStagesQ = Traits::kNumStagesQ;
  static constexpr int kOffsetK = kStagesQ * kBytesQ;
  static constexpr int kOffsetV = kOffsetK + kStages * kBytesK;
  using Scores = ScoreTileShape<Traits>;
  static constexpr int kStagesScores = Scores::kStages;
  static constexpr bool kTileWords = Traits::kTileWords;
  static constexpr int kStagesClean = Traits::kMask ? kStages : 0;
  static constexpr int kOffsetScores = kOffsetV + kStages * kBytesV;
  static constexpr int kOffsetTiles = kOffsetScores + kStagesScores * Scores::kBytes;
  static constexpr int kBytesTile = Traits::kVarlen ? 32 : 16;  // of what is announced
  // kTileWords: a word beside each slot of K, which key tile it holds.
  static constexpr int kOffsetKeyTiles = kOffsetTiles + kBytesTile * kStagesQ;
  // kTileBits: beside each slot of K what the mask keeps of its tile, the words of every thread.
  static constexpr bool kTileBits = Traits::kTileBits;
  using Bits = ThreadBits<kTilesN>;
  static constexpr int kOffsetGroupWords = kConsumers * Bits::kBytes;  // behind the bits of a tile
  static constexpr int kBytesBits = kTileBits ? kOffsetGroupWords + GroupWords<kGroups>::kBytes : 0;
  static constexpr int kOffsetBits = kOffsetKeyTiles + (Traits::kTileWords ? 16 : 0);
  // What is known of a key tile before its scores: whether it is whole, and kTileBits where this thread's bits are.
  using KnownTile = cute::conditional_t<kTileBits, TileWithBits, bool>;
  // kBeginsProducts: what products begin with, and how many warps of the loading group compute it.
  using Begun = BegunProducts<kBlockM, kBlockN, kStages, false>;
  static constexpr int kDiagonalWarps = Traits::kBeginsProducts ? 3 : 0;
  static constexpr int kOffsetDiagonals = kOffsetBits + kStages * kBytesBits;
  // kMaxLogit and kLazyMax: the largest scores of two rows of every thread.
  static constexpr int kOffsetNoted = kOffsetDiagonals + (Traits::kBeginsProducts ? Begun::kBytes : 0);
  static constexpr int kBytesNoted = Traits::kMaxLogit && Traits::kLazyMax ? 8 * Traits::kNumThreads : 0;
  static constexpr int kOffsetBarriers = kOffsetNoted + kBytesNoted;

  // Places of the mbarriers; of what has slots, that of the first.
  enum Place : int {
    kFullK,
    kFullV = kFullK + kStages,
    kEmptyK = kFullV + kStages,
    kEmptyV = kEmptyK + kStages,
    kFullQ = kEmptyV + kStages,
    kEmptyQ = kFullQ + kStagesQ,
    kFullScores = kEmptyQ + kStagesQ,
    kEmptyScores = kFullScores + kStagesScores,
    kCleanV = kEmptyScores + kStagesScores,
  };
  // Hardware barriers; 0 is __syncthreads.
  enum NamedBarrier : int {
    kTurnOfGroup = 1,  // + group: it may start products
    kAllConsumers = kTurnOfGroup + kGroups,
  };
  static constexpr int kTurnThreads = 256;  // the group that waits and the one that lets it start

  // 65536 registers, shared by kBlocks thread blocks: what the consumers need, the rest to the loading group.
  static constexpr bool kSmallTile = Traits::kHasBias || Traits::kMask || Traits::kBeginsProducts;
  static constexpr int kBlocks = Traits::kMinBlocksPerSm;
  static constexpr int kRegistersConsumer = kBlocks == 3   ? 136
                                            : kBlocks == 2 ? (kTileWords ? 200 : 232)
                                            : kGroups == 3 ? 160
                                            : kTileWords   ? 224
                                            : kSmallTile   ? 232
                                                           : 240;
  static constexpr int kRegistersProducer = kBlocks == 3   ? 24
                                            : kBlocks == 2 ? (kTileWords ? 56 : 24)
                                            : kGroups == 3 ? 32
                                            : kTileWords   ? 56
                                            : kSmallTile   ? 40
                                                           : 24;

  // A group that asks for more than the block was launched with would wait for ever.
  static_assert(kGroups * kRegistersConsumer + kRegistersProducer <=
                    65536 / (kBlocks * Traits::kNumThreads) / 8 * 8 * (kGroups + 1),
                "registers of the block");
  static_assert(Traits::kNumThreads == 128 + kConsumers, "a loading warp-group and one per 64 rows");
  static_assert(kBlockM % 64 == 0 && kGroups <= 3, "one to three consumers");
  static_assert(kBlocks == 1 || kGroups == 1, "one consumer each");
  static_assert(!(Traits::kHalfTile && Traits::kDropout && !Traits::kKeepWords),
                "the first tile makes the flags of a whole one");
  static_assert(!Traits::kKeepWords || (Traits::kDropout && !(Traits::kVarlen || Traits::kSplit || Traits::kTileWords)),
                "words of whole sequences, alone in their buffer");
  static_assert(!Traits::kTileWords ||
                    ((Traits::kMask || ModifierOf<Traits>::kMasks) && !Traits::kVarlen && kStages <= 4),
                "words are of a mask");
  static_assert(!kTileBits || (kTileWords && ModifierOf<Traits>::kMasks && !Traits::kMask && Traits::kTickets &&
                               !Traits::kHalfTile),
                "bits are of a user's mask, and their counter lies beside that of tickets");
  static_assert(!Traits::kPackedHeads || !(Traits::kVarlen || Traits::kHasBias || Traits::kMask || Traits::kDropout ||
                                           Traits::kHasSink || Traits::kHalfTile),
                "rows of several heads have nothing but scores");
  static_assert(!Traits::kSplit ||
                    !(Traits::kVarlen || Traits::kHasBias || Traits::kMask || Traits::kDropout || Traits::kHasSink ||
                      kTileWords || Traits::kTickets || Traits::kMaxLogit || Traits::kBeginsProducts),
                "partial results have nothing but scores, and no counter beside them");
  static_assert(!Traits::kBeginsProducts || !(kTileWords || Traits::kPackedHeads || Traits::kHasBias || Traits::kMask ||
                                              Traits::kSoftcap || kBlocks > 1),
                "who computes diagonals goes through all key tiles, and scores are products else");
  static_assert(kStages >= 2, "a consumer waits for the next K before it gives back a V");
  static_assert(kBlockN % 16 == 0 && Traits::kHeadDim % 16 == 0 && Traits::kHeadDimV % 16 == 0,
                "matrix product shapes");
};

template <class Shape>
struct ForwardBarriers {
  unsigned base;  // shared address
  NVRTC_ATTN_DEVICE Mbarrier full_k(int stage) const { return at(Shape::kFullK + stage); }
  NVRTC_ATTN_DEVICE Mbarrier full_v(int stage) const { return at(Shape::kFullV + stage); }
  NVRTC_ATTN_DEVICE Mbarrier empty_k(int stage) const { return at(Shape::kEmptyK + stage); }
  NVRTC_ATTN_DEVICE Mbarrier empty_v(int stage) const { return at(Shape::kEmptyV + stage); }
  NVRTC_ATTN_DEVICE Mbarrier full_q(int stage) const { return at(Shape::kFullQ + stage); }
  NVRTC_ATTN_DEVICE Mbarrier empty_q(int stage) const { return at(Shape::kEmptyQ + stage); }
  NVRTC_ATTN_DEVICE Mbarrier full_scores(int stage) const { return at(Shape::kFullScores + stage); }
  NVRTC_ATTN_DEVICE Mbarrier empty_scores(int stage) const { return at(Shape::kEmptyScores + stage); }
  // kMask: V is there, and rows that the mask hides from all queries are zero. Otherwise full_v says all.
  NVRTC_ATTN_DEVICE Mbarrier clean_v(int stage) const { return at(Shape::kCleanV + stage); }

  NVRTC_ATTN_DEVICE void init() const {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      full_k(stage).init(1 + Shape::kDiagonalWarps);
      full_v(stage).init(1);
      empty_k(stage).init(4 * Shape::kGroups);
      empty_v(stage).init(4 * Shape::kGroups);
    }
    for (int stage = 0; stage < Shape::kStagesQ; ++stage) {
      full_q(stage).init(1);
      empty_q(stage).init(4 * Shape::kGroups + Shape::kDiagonalWarps);
    }
    for (int stage = 0; stage < Shape::kStagesScores; ++stage) {
      full_scores(stage).init(1);
      empty_scores(stage).init(4 * Shape::kGroups);
    }
    for (int stage = 0; stage < Shape::kStagesClean; ++stage) clean_v(stage).init(1);
    fence_barrier_init();
  }

 private:
  NVRTC_ATTN_DEVICE Mbarrier at(int place) const { return {base + Mbarrier::kBytes * place}; }
};

}  // namespace nvrtc_attn
