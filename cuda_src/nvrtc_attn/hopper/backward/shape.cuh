// What the shared memory of the Hopper backward kernel holds, and where; what for is at the head of
// kernel/backward_hopper.cuh.
#pragma once
#include "../../collective/modifier.cuh"
#include "../../collective/tile_bits.cuh"
#include "../common/begun_products.cuh"
#include "../common/wgmma.cuh"
#include "barriers.cuh"
#include "helpers.cuh"
#include "prepare_rows.cuh"

namespace nvrtc_attn {

template <class Traits>
struct HopperBackwardShape {
  using Element = typename Traits::Element;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr int kStages = Traits::kNumStages;
  static constexpr int kStagesDout = kStages;
  static constexpr int kBlocks = 1;      // that share a key tile
  static constexpr int kKeys = kBlockN;  // of one block
  static constexpr int kGroups = kBlockN / 64;
  static constexpr int kConsumers = 128 * kGroups;
  static constexpr int kReadersV = kConsumers / 32;  // warps
  static constexpr int kTilesM = kBlockM / 8;
  static constexpr int kStepsM = kBlockM / 16;
  static constexpr int kTilesD = kHeadDim / 8;
  static constexpr int kTilesDv = kHeadDimV / 8;
  static constexpr int kSlabs = (kHeadDim + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlabsV = (kHeadDimV + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlabQ = kBlockM * kSlabRowBytes;
  static constexpr int kSlabK = kBlockN * kSlabRowBytes;
  static constexpr int kBytesQ = kSlabs * kSlabQ;
  static constexpr int kBytesDout = kSlabsV * kSlabQ;
  static constexpr int kBytesK = kSlabs * kSlabK;
  static constexpr int kBytesV = kSlabsV * kSlabK;
  static constexpr int kBytesDs = kGroups * kSlabQ;
  // Two slots of K: dv leaves through a place of its own and dk through the slot of its keys (hopper/backward/relay.cuh).
  static constexpr bool kRelays = Traits::kKeySlots == 2;
  static constexpr int kRelayWarps = 3;
  static constexpr int kBytesRelay = kRelays ? kBytesV : 0;
  static constexpr int kBytesStatistic = kBlockM * 4;
  static constexpr bool kBiasTiles = Traits::kBiasTiles;
  static constexpr bool kStoresTiles = kBiasTiles && Traits::kDbiasStore;
  static constexpr int kBytesZeros = kStoresTiles && Traits::kBand ? kSlabQ : 0;

  // dQ of a group: 64 query rows and all columns, or all 64 rows and one slab, or half a slab, of columns. Of 80 queries dQ^T:
  // one slab of columns, in multiples of 16 for a warp, and all queries.
  static constexpr bool kSplitRows = kBlockM == 128;
  static constexpr bool kTransposedDq = kBlockM == 80;
  // dV is started before dS is computed: with keep words the other order has too few registers, and of one key tile, often one
  // turn of the loop, no turn before or after fills what the later start leaves. Beside sums along diagonals it spills 20 bytes
  // instead of 84 to 112, and a trained table takes 2 to 6 % less; untrained 1 % more.
  static constexpr bool kSumsBesideBegun = Traits::kBeginsProducts && ModifierOf<Traits>::kTrainsByDistance;
  static constexpr bool kEarlyDv = Traits::kKeepWords || Traits::kOneKeyTile || (kSumsBesideBegun && kSplitRows);
  static constexpr int kBytesDq = kTransposedDq ? kBlockM * kHeadDim * 4 : 0;  // hopper/backward/bulk_additions.cuh
  static constexpr int kTilesDq = kTransposedDq ? kTilesM : kSplitRows ? kTilesD : kSlabs * 4;

  using BarrierMap = BackwardBarrierMap<kBlocks, kStages, kStagesDout, kBiasTiles, Traits::kKeySlots>;
  static constexpr int kOffsetV = Traits::kKeySlots * kBytesK;
  static constexpr int kOffsetQ = kOffsetV + kBytesV;
  static constexpr int kOffsetDout = kOffsetQ + kStages * kBytesQ;
  static constexpr int kOffsetDs = kOffsetDout + kStages * kBytesDout;
  static constexpr int kOffsetDq = kOffsetDs + 2 * kBytesDs;
  static constexpr int kOffsetZeros = kOffsetDq + kBytesDq;
  static constexpr int kOffsetRelay = kOffsetZeros + kBytesZeros;
  static constexpr int kOffsetLse = kOffsetRelay + kBytesRelay;
  static constexpr int kOffsetDelta = kOffsetLse + kStages * kBytesStatistic;
  static constexpr int kOffsetTile = kOffsetDelta + kStages * kBytesStatistic;
  // kTileWords: how many query tiles the key tile has, and beside each slot of Q which one it holds (16 and 8 bytes).
  // kParts: its PartTurns, which have two places.
  static constexpr int kOffsetCount = kOffsetTile + 16 * Traits::kKeySlots;
  static constexpr int kOffsetQueryTiles = kOffsetCount + 16;
  // kTileBits: beside each slot of Q what the mask keeps of its tile, the words of every thread.
  using Bits = ThreadBits<kTilesM>;
  static constexpr int kBytesBits =
      Traits::kTileBits ? kConsumers * Bits::kBytes + GroupWords<kConsumers / 128>::kBytes : 0;
  static constexpr int kOffsetBits =
      kOffsetCount + (Traits::kTileWords ? 16 + 8 * kStages : 0) + (Traits::kParts ? 32 : 0);
  // Sums of captured arrays' elements that a warp holds.
  static constexpr int kOffsetHeld = kOffsetBits + kStages * kBytesBits;
  static constexpr int kBytesHeld = kConsumers / 32 * CapturedGradients<ModifierOf<Traits>>::kBytesHeld;
  // kBeginsProducts: what products begin with, and how many warps of the loading group compute it.
  using Begun = BegunProducts<kBlockN, kBlockM, kStages, true>;
  static constexpr int kDiagonalWarps = HelperShape<Traits>::kDiagonalWarps;
  static constexpr int kOffsetDiagonals = kOffsetHeld + kBytesHeld;
  static constexpr int kOffsetBarriers = kOffsetDiagonals + (Traits::kBeginsProducts ? Begun::kBytes : 0);
  static_assert(kBytesHeld == 0 || kOffsetHeld % 16 == 0, "what one access moves");
  static_assert(!Traits::kTileBits || (kOffsetBits % 16 == 0 && kBytesBits % 16 == 0), "what the copy engine moves");
  static constexpr int kOffsetHelpers = kOffsetBarriers + BarrierMap::kBytes;
  static constexpr int kBytes =
      kOffsetHelpers + (Traits::kFused ? PieceShape<Traits>::kBytes : HelperShape<Traits>::kBytes);
  static_assert(kBytes == Traits::kSmemBytes, "smem_bytes of the config and the layout of the kernel differ");

  static_assert(kGroups == 2 && Traits::kNumThreads == 128 + kConsumers + HelperShape<Traits>::kThreads,
                "two groups share the products of dQ");
  static_assert(kStages == 2, "slots of dS go with those of Q");
  static_assert(!(Traits::kOneKeyTile && Traits::kVarlen), "dq of tokens outside every sequence");
  static_assert(!(Traits::kOneKeyTile && Traits::kOrdered), "nothing to order");
  static_assert(!Traits::kTileWords || ((Traits::kMask || ModifierOf<Traits>::kMasks) && !Traits::kVarlen &&
                                        !Traits::kOneKeyTile && !kBiasTiles),
                "words are of a mask; dq of query tiles that no key tile visits comes from the workspace");
  static_assert(!Traits::kTileBits || (Traits::kTileWords && ModifierOf<Traits>::kMasks && !Traits::kMask),
                "bits are of a user's mask");
  static_assert(!Traits::kKeyMask || (Traits::kMask && !Traits::kDropout && !Traits::kSoftcap && !Traits::kHasBias),
                "scores that are products, of keys that are there or not");
  static_assert(!(Traits::kSplit && Traits::kOrdered), "dk and dv have no order of additions");
  static_assert(!(Traits::kSplit && kStoresTiles), "the loading warp has no register for both");
  static_assert(!(ModifierOf<Traits>::kAny && (kBiasTiles || Traits::kKeepWords || Traits::kKeyMask)),
                "beside a modifier threads read what they need");
  static_assert(!(kBiasTiles && Traits::kKeepWords), "P waits for neither or for one of them");
  static_assert(!Traits::kBeginsProducts ||
                    !(Traits::kHasBias || Traits::kMask || Traits::kDropout || Traits::kSoftcap || Traits::kTileWords ||
                      Traits::kParts || Traits::kDescending || Traits::kKeysInRegisters || kOffsetDiagonals % 16 != 0),
                "who computes diagonals goes up through all query tiles, and scores are products else");
  static constexpr bool kPlainOrPacked =
      !(kBiasTiles || Traits::kHasBias || Traits::kMask || Traits::kDropout || Traits::kSoftcap || Traits::kSequsedK ||
        Traits::kOneKeyTile || Traits::kOrdered || ModifierOf<Traits>::kAny);
  static constexpr bool kPlain = kPlainOrPacked && !Traits::kVarlen;
  static_assert(!kRelays || (kPlainOrPacked && !kTransposedDq && !Traits::kFused && !Traits::kSplit &&
                             !Traits::kParts && !Traits::kFloat32K),
                "idle warps, and dk and dv of a whole key tile in 16 bits");
  static_assert(kPlain || !Traits::kFused, "registers, and the warps that prepare rows");
  static_assert(kBlockM == 64 || kTransposedDq || kBlockM == 128, "a group computes 64 rows of dQ or of dQ^T");
  static_assert(kSplitRows ? kSlabs == 1 : kTransposedDq ? kSlabs == kGroups : kSlabs <= kGroups, "columns of dQ");
  static_assert(kPlain || !kTransposedDq, "registers");
  static_assert(!Traits::kParts || !(kBiasTiles || Traits::kHasBias || (Traits::kMask && !Traits::kKeyMask) ||
                                     Traits::kTileWords || Traits::kDropout || Traits::kSoftcap || Traits::kVarlen ||
                                     Traits::kSequsedK || Traits::kOrdered || Traits::kSplit),
                "turns that nothing but lengths decides, and registers");
  static_assert(!Traits::kOwnCode || (!kSplitRows && !kTransposedDq && kSlabs == kGroups),
                "dQ of one group has fewer columns than that of the other");
  static_assert(!(Traits::kKeysInRegisters || Traits::kValuesInRegisters) || (kHeadDim <= 96 && kHeadDimV <= 96),
                "registers");
  static_assert(!(Traits::kFused && kTransposedDq), "shared memory, and a tile is no whole number of pieces");
  static_assert(kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "matrix product shapes");
  static_assert(!kBiasTiles || (sizeof(typename Traits::Bias) == 2 && !Traits::kSoftcap && !Traits::kVarlen),
                "what the tiles of bias and dS have in common");
};

}  // namespace nvrtc_attn
