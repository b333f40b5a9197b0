// One centre by one warp, a neighbour at a time. The products of a tile multiply a neighbour that a centre does not
// attend to by 0, which an infinity or NaN survives: a centre whose results are not finite is done again here.
#pragma once

#include "neighbours.h"
#include "products.h"

namespace sfno_dist::cuda {

template <Number NUMBER, Pass PASS> class LoneCentre {
    using P = Products<NUMBER>;
    using Stored = typename P::Stored;
    static constexpr bool kForward = PASS == Pass::forward, kKeys = PASS == Pass::key_gradient;
    static constexpr int kChannels = kSliceChannels / 32;  // of a lane: 32 i + lane of the slice

    const Launch &launch;
    const sfno_dist_attention &call;
    const int64_t field;
    const int batch, head, first_channel, row, column;
    const int2 place;
    float maximum = -HUGE_VALF, total = 0.0f;
    float sums[2][kChannels] = {};  // of ds with the first operand, of p with the second

   public:
    __device__ LoneCentre(const Launch &launch, const TileView &view, int centre, int64_t field, int slice)
        : launch(launch), call(launch.call), field(field), batch(int(field) / int(call.heads)),
          head(int(field) % int(call.heads)), first_channel(slice * kSliceChannels + lane_id()),
          row(view.tile.first_row + view.row_of(centre)), column(view.column_of(centre, launch.centre)),
          place(view.place(centre, launch.centre)) {}

    __device__ __forceinline__ void run() {
        if (place.x < 0) return;
        const int rows = int(kKeys ? call.query_rows : call.key_rows);
        for (int near_row = 0; near_row < rows; ++near_row) {
            const int32_t half_width = call.half_widths[row * launch.centre_width_stride +
                                                        near_row * launch.neighbour_width_stride];
            const int held = half_width < 0 ? 0 : launch.neighbour.columns(near_row);
            for (int local = 0; local < held; local += 32) {
                const int own = local + lane_id();
                const unsigned near = __ballot_sync(kAllLanes, own < held && apart(near_row, own) <= half_width);
#pragma unroll 1
                for (int i = 0; i < 32; ++i)
                    if (near >> i & 1u) add(near_row, local + i);
            }
        }
        const float scale = !kForward ? 1.0f : total == 0.0f ? 0.0f : 1.0f / total;
        if constexpr (!kForward) put(kKeys ? call.dk : call.dq, call.depth, 1.0f, sums[0]);
        if constexpr (PASS != Pass::query_gradient) put(kForward ? call.y : call.dv, call.value_depth, scale, sums[1]);
    }

   private:
    // Ticks between the centre and a neighbour, the shorter way around.
    __device__ int32_t apart(int near_row, int local) const {
        const Side &side = launch.neighbour;
        const int32_t near_column = (side.first_column(near_row) + local) % side.nlon;
        const int32_t ticks = near_column * side.step - column * launch.centre.step;
        const int32_t distance = ticks < 0 ? -ticks : ticks;
        return distance < launch.ticks - distance ? distance : launch.ticks - distance;
    }

    __device__ Stored *at(const sfno_dist_tensor &tensor, int64_t row, int64_t column) const {
        return (Stored *)tensor.data + batch * tensor.batch_stride + head * tensor.head_stride +
               row * tensor.row_stride + column * tensor.column_stride;
    }

    __device__ __forceinline__ static float dot(const Stored *a, const Stored *b, int64_t width) {
        float sum = 0.0f;
        for (int c = lane_id(); c < width; c += 32) sum += P::widened(a[c]) * P::widened(b[c]);
        for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(kAllLanes, sum, other);
        return sum;
    }

    __device__ __forceinline__ void add(int near_row, int local) {
        const int64_t start = launch.neighbour.start(near_row);
        const Stored *const first = at(kKeys ? call.q : call.k, start, local);
        const Stored *const second = at(kKeys ? call.dy : call.v, start, local);
        const float score = kLog2E * dot(at(kKeys ? call.k : call.q, place.x, place.y), first, call.depth) +
                            log2f(float(call.key_weights[kKeys ? row : near_row]));
        float p, ds = 0.0f, shrink = 1.0f;
        if constexpr (kForward) {
            const float greatest = fmaxf(maximum, score), base = greatest == -HUGE_VALF ? 0.0f : greatest;
            shrink = exp2_fast(maximum - base), p = exp2_fast(score - base);
            total = total * shrink + p, maximum = greatest;
        } else {
            const float2 query = launch.statistics[kKeys ? query_index(call, field, near_row, local)
                                                         : query_index(call, field, place.x, place.y)];
            p = exp2_fast(score + query.x);
            ds = p * (dot(at(kKeys ? call.v : call.dy, place.x, place.y), second, call.value_depth) - query.y);
        }
        for (int i = 0; i < kChannels; ++i) {
            const int channel = first_channel + 32 * i;
            if (!kForward && channel < call.depth) sums[0][i] += ds * P::widened(first[channel]);
            if (channel < call.value_depth) sums[1][i] = sums[1][i] * shrink + p * P::widened(second[channel]);
        }
    }

    __device__ void put(const sfno_dist_tensor &tensor, int64_t width, float scale, const float (&results)[kChannels]) {
        Stored *const to = at(tensor, place.x, place.y);
        for (int i = 0; i < kChannels; ++i)
            if (first_channel + 32 * i < width) P::put(scale * results[i], to + first_channel + 32 * i);
    }
};

}  // namespace sfno_dist::cuda
