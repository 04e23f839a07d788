// Iterates over a thread's elements and their indices along axes of these sizes.
struct Walk {
    I i, w, h, d, image, W, H, D, step, step_w, step_h, step_d, step_image;
    __device__ Walk(I W, I H, I D)
        : i((I)blockIdx.x * THREADS + threadIdx.x), w(i % W), h(i / W % H),
          d(i / W / H % D), image(i / W / H / D), W(W), H(H), D(D),
          step((I)gridDim.x * THREADS), step_w(step % W), step_h(step / W % H),
          step_d(step / W / H % D), step_image(step / W / H / D) {}
    __device__ void next() {
        i += step;
        w += step_w;
        h += step_h;
        d += step_d;
        image += step_image;
        if (w >= W) w -= W, ++h;
        if (h >= H) h -= H, ++d;
        if (d >= D) d -= D, ++image;
    }
};
#define EACH_AT(at, count, W, H, D) for (Walk at(W, H, D); at.i < (count); at.next())
