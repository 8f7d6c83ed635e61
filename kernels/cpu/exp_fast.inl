// exp(x) for x <= 88 within 2 ulp: x = n ln2 + r, |r| <= ln2 / 2, a polynomial for exp(r), n into the exponent. Below -87
// it stays at exp(-87), 1.6e-38, which is as good as zero beside a sum that is at least 1.
inline float exp_fast(float x) {
  constexpr float kLog2e = 1.44269504F;
  constexpr float kLn2High = 0.693359375F;
  constexpr float kLn2Low = -2.12194440e-4F;
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  x = x < -87.0F ? -87.0F : x;
  x = x > 88.0F ? 88.0F : x;
  const float shifted = x * kLog2e + kRound;
  const float n = shifted - kRound;
  float r = x - n * kLn2High;
  r = r - n * kLn2Low;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * r * r + r + 1.0F;
  int bits;
  __builtin_memcpy(&bits, &shifted, sizeof bits);
  bits = static_cast<int>(static_cast<unsigned>(bits) << 23) + 0x3f800000;
  float power;
  __builtin_memcpy(&power, &bits, sizeof power);
  return p * power;
}
