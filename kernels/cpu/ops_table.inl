// The functions of ops_impl.inl, ops_rotated.inl and ops_rotated_encode.inl, behind them.

constexpr Ops kOps = {POLYKV_OPS_NAME,    f32_from_f16_loop,   f32_from_bf16_loop,
                      f16_from_f32_loop,  bf16_from_f32_loop,  max_abs_rows,
                      add_rows_to,        norms_of,            k8_pack_rows,
                      v8_pack_rows,       v3_pack_rows,        k8_unpack_rows,
                      v8_unpack_rows,     v3_unpack_rows,      rotated_encode_rows,
                      rotated_decode_rows, rotate_in_place,    rotate_back_in_place,
                      k_pack_pieces,      k_unpack_pieces,     v_pack_planes,
                      v_unpack_planes,    POLYKV_DECODE_BLOCK};
