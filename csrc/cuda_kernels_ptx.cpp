// Made by cuda_make_kernels.sh from cuda_kernels.cu. Do not edit.
#include "cuda_kernels.h"

namespace kvferry {

const char kCopyKernels[] = R"ptx(
.version 7.7
.target sm_75
.address_size 64
.visible .entry copy_pages_16(
	.param .align 8 .b8 copy_pages_16_param_0[3904]
)
.maxntid 1024, 1, 1
.minnctapersm 2
{
	.reg .pred 	%p<15>;
	.reg .b32 	%r<232>;
	.reg .b64 	%rd<61>;
	mov.b64 	%rd13, copy_pages_16_param_0;
	ld.param.u32 	%r1, [copy_pages_16_param_0+44];
	add.s32 	%r88, %r1, 2047;
	shr.u32 	%r89, %r88, 11;
	ld.param.u32 	%r2, [copy_pages_16_param_0+52];
	mul.lo.s32 	%r90, %r89, %r2;
	mov.u32 	%r91, %ntid.x;
	shr.u32 	%r92, %r91, 5;
	ld.param.u32 	%r3, [copy_pages_16_param_0+56];
	mul.wide.u32 	%rd14, %r90, %r3;
	mov.u32 	%r93, %ctaid.x;
	mov.u32 	%r94, %tid.x;
	shr.u32 	%r95, %r94, 5;
	mad.lo.s32 	%r96, %r92, %r93, %r95;
	cvt.u64.u32 	%rd58, %r96;
	setp.le.u64 	%p1, %rd14, %rd58;
	@%p1 bra 	$L__BB0_24;
$L__BB0_2:
	and.b64  	%rd15, %rd58, -4294967296;
	setp.eq.s64 	%p2, %rd15, 0;
	@%p2 bra 	$L__BB0_4;
	cvt.u64.u32 	%rd16, %r90;
	div.u64 	%rd59, %rd58, %rd16;
	mul.lo.s64 	%rd17, %rd59, %rd16;
	sub.s64 	%rd60, %rd58, %rd17;
	bra.uni 	$L__BB0_5;
$L__BB0_4:
	cvt.u32.u64 	%r104, %rd58;
	div.u32 	%r105, %r104, %r90;
	mul.lo.s32 	%r106, %r105, %r90;
	sub.s32 	%r107, %r104, %r106;
	cvt.u64.u32 	%rd59, %r105;
	cvt.u64.u32 	%rd60, %r107;
$L__BB0_5:
	cvt.u32.u64 	%r110, %rd60;
	div.u32 	%r111, %r110, %r89;
	ld.param.u32 	%r112, [%rd13+48];
	add.s32 	%r113, %r111, %r112;
	mul.lo.s32 	%r114, %r111, %r89;
	sub.s32 	%r115, %r110, %r114;
	shl.b32 	%r116, %r115, 11;
	ld.param.v2.u32 	{%r117, %r118}, [%rd13+40];
	div.u32 	%r121, %r113, %r117;
	ld.param.u64 	%rd19, [%rd13];
	cvta.to.global.u64 	%rd20, %rd19;
	mul.wide.u32 	%rd21, %r121, 8;
	add.s64 	%rd22, %rd20, %rd21;
	shl.b64 	%rd23, %rd59, 2;
	and.b64  	%rd24, %rd23, 17179869180;
	add.s64 	%rd25, %rd13, %rd24;
	ld.param.u32 	%rd26, [%rd25+64];
	ld.param.u64 	%rd27, [%rd13+8];
	cvta.to.global.u64 	%rd28, %rd27;
	add.s64 	%rd29, %rd28, %rd21;
	ld.global.u64 	%rd30, [%rd29];
	mul.lo.s64 	%rd31, %rd30, %rd26;
	ld.param.u32 	%r122, [%rd13+40];
	rem.u32 	%r123, %r113, %r122;
	cvt.u64.u32 	%rd32, %r123;
	ld.param.u64 	%rd33, [%rd13+16];
	mul.lo.s64 	%rd34, %rd33, %rd32;
	ld.global.u64 	%rd35, [%rd22];
	add.s64 	%rd36, %rd31, %rd35;
	add.s64 	%rd37, %rd36, %rd34;
	ld.param.u32 	%rd38, [%rd25+1984];
	ld.param.u64 	%rd39, [%rd13+32];
	mul.lo.s64 	%rd40, %rd39, %rd38;
	ld.param.u64 	%rd41, [%rd13+24];
	add.s64 	%rd42, %rd40, %rd41;
	mul.wide.u32 	%rd43, %r118, %r113;
	add.s64 	%rd44, %rd42, %rd43;
	ld.param.u32 	%r124, [%rd13+60];
	setp.eq.s32 	%p3, %r124, 0;
	selp.b64 	%rd9, %rd44, %rd37, %p3;
	selp.b64 	%rd10, %rd37, %rd44, %p3;
	add.s32 	%r125, %r116, 2048;
	ld.param.u32 	%r126, [%rd13+44];
	min.u32 	%r20, %r125, %r126;
	shl.b32 	%r128, %r94, 4;
	and.b32  	%r129, %r128, 496;
	or.b32  	%r199, %r116, %r129;
	setp.ge.u32 	%p4, %r199, %r20;
	@%p4 bra 	$L__BB0_23;
$L__BB0_6:
	cvt.u64.u32 	%rd11, %r199;
	setp.ge.u32 	%p5, %r199, %r20;
	@%p5 bra 	$L__BB0_8;
	add.s64 	%rd45, %rd9, %rd11;
	ld.global.cs.v4.u32 {%r203,%r202,%r201,%r200}, [%rd45];
$L__BB0_8:
	cvt.u32.u64 	%r134, %rd11;
	add.s32 	%r135, %r134, 512;
	setp.ge.u32 	%p6, %r135, %r20;
	@%p6 bra 	$L__BB0_10;
	add.s64 	%rd47, %rd9, %rd11;
	add.s64 	%rd46, %rd47, 512;
	ld.global.cs.v4.u32 {%r207,%r206,%r205,%r204}, [%rd46];
$L__BB0_10:
	add.s32 	%r141, %r134, 1024;
	setp.ge.u32 	%p7, %r141, %r20;
	@%p7 bra 	$L__BB0_12;
	add.s64 	%rd49, %rd9, %rd11;
	add.s64 	%rd48, %rd49, 1024;
	ld.global.cs.v4.u32 {%r211,%r210,%r209,%r208}, [%rd48];
$L__BB0_12:
	add.s32 	%r147, %r134, 1536;
	setp.ge.u32 	%p8, %r147, %r20;
	@%p8 bra 	$L__BB0_14;
	add.s64 	%rd51, %rd9, %rd11;
	add.s64 	%rd50, %rd51, 1536;
	ld.global.cs.v4.u32 {%r215,%r214,%r213,%r212}, [%rd50];
$L__BB0_14:
	setp.ge.u32 	%p9, %r134, %r20;
	@%p9 bra 	$L__BB0_16;
	add.s64 	%rd52, %rd10, %rd11;
	st.v4.u32 	[%rd52], {%r203, %r202, %r201, %r200};
$L__BB0_16:
	@%p6 bra 	$L__BB0_18;
	add.s64 	%rd53, %rd10, %rd11;
	st.v4.u32 	[%rd53+512], {%r207, %r206, %r205, %r204};
$L__BB0_18:
	@%p7 bra 	$L__BB0_20;
	add.s64 	%rd54, %rd10, %rd11;
	st.v4.u32 	[%rd54+1024], {%r211, %r210, %r209, %r208};
$L__BB0_20:
	@%p8 bra 	$L__BB0_22;
	add.s64 	%rd55, %rd10, %rd11;
	st.v4.u32 	[%rd55+1536], {%r215, %r214, %r213, %r212};
$L__BB0_22:
	add.s32 	%r199, %r134, 2048;
	setp.lt.u32 	%p13, %r199, %r20;
	@%p13 bra 	$L__BB0_6;
$L__BB0_23:
	mov.u32 	%r162, %nctaid.x;
	mul.lo.s32 	%r163, %r92, %r162;
	cvt.u64.u32 	%rd56, %r163;
	add.s64 	%rd58, %rd58, %rd56;
	setp.lt.u64 	%p14, %rd58, %rd14;
	@%p14 bra 	$L__BB0_2;
$L__BB0_24:
	ret;
}
.visible .entry copy_pages_4(
	.param .align 8 .b8 copy_pages_4_param_0[3904]
)
.maxntid 1024, 1, 1
.minnctapersm 2
{
	.reg .pred 	%p<15>;
	.reg .b32 	%r<112>;
	.reg .b64 	%rd<61>;
	mov.b64 	%rd13, copy_pages_4_param_0;
	ld.param.u32 	%r1, [copy_pages_4_param_0+44];
	add.s32 	%r28, %r1, 2047;
	shr.u32 	%r29, %r28, 11;
	ld.param.u32 	%r2, [copy_pages_4_param_0+52];
	mul.lo.s32 	%r30, %r29, %r2;
	mov.u32 	%r31, %ntid.x;
	shr.u32 	%r32, %r31, 5;
	ld.param.u32 	%r3, [copy_pages_4_param_0+56];
	mul.wide.u32 	%rd14, %r30, %r3;
	mov.u32 	%r33, %ctaid.x;
	mov.u32 	%r34, %tid.x;
	shr.u32 	%r35, %r34, 5;
	mad.lo.s32 	%r36, %r32, %r33, %r35;
	cvt.u64.u32 	%rd58, %r36;
	setp.le.u64 	%p1, %rd14, %rd58;
	@%p1 bra 	$L__BB1_24;
$L__BB1_2:
	and.b64  	%rd15, %rd58, -4294967296;
	setp.eq.s64 	%p2, %rd15, 0;
	@%p2 bra 	$L__BB1_4;
	cvt.u64.u32 	%rd16, %r30;
	div.u64 	%rd59, %rd58, %rd16;
	mul.lo.s64 	%rd17, %rd59, %rd16;
	sub.s64 	%rd60, %rd58, %rd17;
	bra.uni 	$L__BB1_5;
$L__BB1_4:
	cvt.u32.u64 	%r44, %rd58;
	div.u32 	%r45, %r44, %r30;
	mul.lo.s32 	%r46, %r45, %r30;
	sub.s32 	%r47, %r44, %r46;
	cvt.u64.u32 	%rd59, %r45;
	cvt.u64.u32 	%rd60, %r47;
$L__BB1_5:
	cvt.u32.u64 	%r50, %rd60;
	div.u32 	%r51, %r50, %r29;
	ld.param.u32 	%r52, [%rd13+48];
	add.s32 	%r53, %r51, %r52;
	mul.lo.s32 	%r54, %r51, %r29;
	sub.s32 	%r55, %r50, %r54;
	shl.b32 	%r56, %r55, 11;
	ld.param.v2.u32 	{%r57, %r58}, [%rd13+40];
	div.u32 	%r61, %r53, %r57;
	ld.param.u64 	%rd19, [%rd13];
	cvta.to.global.u64 	%rd20, %rd19;
	mul.wide.u32 	%rd21, %r61, 8;
	add.s64 	%rd22, %rd20, %rd21;
	shl.b64 	%rd23, %rd59, 2;
	and.b64  	%rd24, %rd23, 17179869180;
	add.s64 	%rd25, %rd13, %rd24;
	ld.param.u32 	%rd26, [%rd25+64];
	ld.param.u64 	%rd27, [%rd13+8];
	cvta.to.global.u64 	%rd28, %rd27;
	add.s64 	%rd29, %rd28, %rd21;
	ld.global.u64 	%rd30, [%rd29];
	mul.lo.s64 	%rd31, %rd30, %rd26;
	ld.param.u32 	%r62, [%rd13+40];
	rem.u32 	%r63, %r53, %r62;
	cvt.u64.u32 	%rd32, %r63;
	ld.param.u64 	%rd33, [%rd13+16];
	mul.lo.s64 	%rd34, %rd33, %rd32;
	ld.global.u64 	%rd35, [%rd22];
	add.s64 	%rd36, %rd31, %rd35;
	add.s64 	%rd37, %rd36, %rd34;
	ld.param.u32 	%rd38, [%rd25+1984];
	ld.param.u64 	%rd39, [%rd13+32];
	mul.lo.s64 	%rd40, %rd39, %rd38;
	ld.param.u64 	%rd41, [%rd13+24];
	add.s64 	%rd42, %rd40, %rd41;
	mul.wide.u32 	%rd43, %r58, %r53;
	add.s64 	%rd44, %rd42, %rd43;
	ld.param.u32 	%r64, [%rd13+60];
	setp.eq.s32 	%p3, %r64, 0;
	selp.b64 	%rd9, %rd44, %rd37, %p3;
	selp.b64 	%rd10, %rd37, %rd44, %p3;
	add.s32 	%r65, %r56, 2048;
	ld.param.u32 	%r66, [%rd13+44];
	min.u32 	%r8, %r65, %r66;
	shl.b32 	%r68, %r34, 2;
	and.b32  	%r69, %r68, 124;
	or.b32  	%r103, %r56, %r69;
	setp.ge.u32 	%p4, %r103, %r8;
	@%p4 bra 	$L__BB1_23;
$L__BB1_6:
	cvt.u64.u32 	%rd11, %r103;
	setp.ge.u32 	%p5, %r103, %r8;
	@%p5 bra 	$L__BB1_8;
	add.s64 	%rd45, %rd9, %rd11;
	ld.global.cs.u32 %r104, [%rd45];
$L__BB1_8:
	cvt.u32.u64 	%r71, %rd11;
	add.s32 	%r72, %r71, 128;
	setp.ge.u32 	%p6, %r72, %r8;
	@%p6 bra 	$L__BB1_10;
	add.s64 	%rd47, %rd9, %rd11;
	add.s64 	%rd46, %rd47, 128;
	ld.global.cs.u32 %r105, [%rd46];
$L__BB1_10:
	add.s32 	%r75, %r71, 256;
	setp.ge.u32 	%p7, %r75, %r8;
	@%p7 bra 	$L__BB1_12;
	add.s64 	%rd49, %rd9, %rd11;
	add.s64 	%rd48, %rd49, 256;
	ld.global.cs.u32 %r106, [%rd48];
$L__BB1_12:
	add.s32 	%r78, %r71, 384;
	setp.ge.u32 	%p8, %r78, %r8;
	@%p8 bra 	$L__BB1_14;
	add.s64 	%rd51, %rd9, %rd11;
	add.s64 	%rd50, %rd51, 384;
	ld.global.cs.u32 %r107, [%rd50];
$L__BB1_14:
	setp.ge.u32 	%p9, %r71, %r8;
	@%p9 bra 	$L__BB1_16;
	add.s64 	%rd52, %rd10, %rd11;
	st.u32 	[%rd52], %r104;
$L__BB1_16:
	@%p6 bra 	$L__BB1_18;
	add.s64 	%rd53, %rd10, %rd11;
	st.u32 	[%rd53+128], %r105;
$L__BB1_18:
	@%p7 bra 	$L__BB1_20;
	add.s64 	%rd54, %rd10, %rd11;
	st.u32 	[%rd54+256], %r106;
$L__BB1_20:
	@%p8 bra 	$L__BB1_22;
	add.s64 	%rd55, %rd10, %rd11;
	st.u32 	[%rd55+384], %r107;
$L__BB1_22:
	add.s32 	%r103, %r71, 512;
	setp.lt.u32 	%p13, %r103, %r8;
	@%p13 bra 	$L__BB1_6;
$L__BB1_23:
	mov.u32 	%r90, %nctaid.x;
	mul.lo.s32 	%r91, %r32, %r90;
	cvt.u64.u32 	%rd56, %r91;
	add.s64 	%rd58, %rd58, %rd56;
	setp.lt.u64 	%p14, %rd58, %rd14;
	@%p14 bra 	$L__BB1_2;
$L__BB1_24:
	ret;
}
.visible .entry copy_pages_1(
	.param .align 8 .b8 copy_pages_1_param_0[3904]
)
.maxntid 1024, 1, 1
.minnctapersm 2
{
	.reg .pred 	%p<15>;
	.reg .b16 	%rs<38>;
	.reg .b32 	%r<74>;
	.reg .b64 	%rd<61>;
	mov.b64 	%rd13, copy_pages_1_param_0;
	ld.param.u32 	%r1, [copy_pages_1_param_0+44];
	add.s32 	%r8, %r1, 2047;
	shr.u32 	%r9, %r8, 11;
	ld.param.u32 	%r2, [copy_pages_1_param_0+52];
	mul.lo.s32 	%r10, %r9, %r2;
	mov.u32 	%r11, %ntid.x;
	shr.u32 	%r12, %r11, 5;
	ld.param.u32 	%r3, [copy_pages_1_param_0+56];
	mul.wide.u32 	%rd14, %r10, %r3;
	mov.u32 	%r13, %ctaid.x;
	mov.u32 	%r14, %tid.x;
	shr.u32 	%r15, %r14, 5;
	mad.lo.s32 	%r16, %r12, %r13, %r15;
	cvt.u64.u32 	%rd58, %r16;
	setp.le.u64 	%p1, %rd14, %rd58;
	@%p1 bra 	$L__BB2_24;
	cvt.u64.u32 	%rd16, %r10;
$L__BB2_2:
	and.b64  	%rd15, %rd58, -4294967296;
	setp.eq.s64 	%p2, %rd15, 0;
	@%p2 bra 	$L__BB2_4;
	div.u64 	%rd59, %rd58, %rd16;
	mul.lo.s64 	%rd17, %rd59, %rd16;
	sub.s64 	%rd60, %rd58, %rd17;
	bra.uni 	$L__BB2_5;
$L__BB2_4:
	cvt.u32.u64 	%r23, %rd58;
	div.u32 	%r24, %r23, %r10;
	mul.lo.s32 	%r25, %r24, %r10;
	sub.s32 	%r26, %r23, %r25;
	cvt.u64.u32 	%rd59, %r24;
	cvt.u64.u32 	%rd60, %r26;
$L__BB2_5:
	cvt.u32.u64 	%r29, %rd60;
	div.u32 	%r30, %r29, %r9;
	ld.param.u32 	%r31, [%rd13+48];
	add.s32 	%r32, %r30, %r31;
	mul.lo.s32 	%r33, %r30, %r9;
	sub.s32 	%r34, %r29, %r33;
	shl.b32 	%r35, %r34, 11;
	ld.param.v2.u32 	{%r36, %r37}, [%rd13+40];
	div.u32 	%r40, %r32, %r36;
	ld.param.u64 	%rd19, [%rd13];
	cvta.to.global.u64 	%rd20, %rd19;
	mul.wide.u32 	%rd21, %r40, 8;
	add.s64 	%rd22, %rd20, %rd21;
	shl.b64 	%rd23, %rd59, 2;
	and.b64  	%rd24, %rd23, 17179869180;
	add.s64 	%rd25, %rd13, %rd24;
	ld.param.u32 	%rd26, [%rd25+64];
	ld.param.u64 	%rd27, [%rd13+8];
	cvta.to.global.u64 	%rd28, %rd27;
	add.s64 	%rd29, %rd28, %rd21;
	ld.global.u64 	%rd30, [%rd29];
	mul.lo.s64 	%rd31, %rd30, %rd26;
	ld.param.u32 	%r41, [%rd13+40];
	rem.u32 	%r42, %r32, %r41;
	cvt.u64.u32 	%rd32, %r42;
	ld.param.u64 	%rd33, [%rd13+16];
	mul.lo.s64 	%rd34, %rd33, %rd32;
	ld.global.u64 	%rd35, [%rd22];
	add.s64 	%rd36, %rd31, %rd35;
	add.s64 	%rd37, %rd36, %rd34;
	ld.param.u32 	%rd38, [%rd25+1984];
	ld.param.u64 	%rd39, [%rd13+32];
	mul.lo.s64 	%rd40, %rd39, %rd38;
	ld.param.u64 	%rd41, [%rd13+24];
	add.s64 	%rd42, %rd40, %rd41;
	mul.wide.u32 	%rd43, %r37, %r32;
	add.s64 	%rd44, %rd42, %rd43;
	ld.param.u32 	%r43, [%rd13+60];
	setp.eq.s32 	%p3, %r43, 0;
	selp.b64 	%rd9, %rd44, %rd37, %p3;
	selp.b64 	%rd10, %rd37, %rd44, %p3;
	add.s32 	%r44, %r35, 2048;
	ld.param.u32 	%r45, [%rd13+44];
	min.u32 	%r4, %r44, %r45;
	and.b32  	%r47, %r14, 31;
	bfi.b32 	%r73, %r34, %r47, 11, 21;
	setp.ge.u32 	%p4, %r73, %r4;
	@%p4 bra 	$L__BB2_23;
$L__BB2_6:
	cvt.u64.u32 	%rd11, %r73;
	setp.ge.u32 	%p5, %r73, %r4;
	@%p5 bra 	$L__BB2_8;
	add.s64 	%rd45, %rd9, %rd11;
	ld.global.cs.u8 %r48, [%rd45];
	cvt.u16.u32 	%rs30, %r48;
$L__BB2_8:
	cvt.u32.u64 	%r49, %rd11;
	add.s32 	%r50, %r49, 32;
	setp.ge.u32 	%p6, %r50, %r4;
	@%p6 bra 	$L__BB2_10;
	add.s64 	%rd47, %rd9, %rd11;
	add.s64 	%rd46, %rd47, 32;
	ld.global.cs.u8 %r51, [%rd46];
	cvt.u16.u32 	%rs31, %r51;
$L__BB2_10:
	add.s32 	%r53, %r49, 64;
	setp.ge.u32 	%p7, %r53, %r4;
	@%p7 bra 	$L__BB2_12;
	add.s64 	%rd49, %rd9, %rd11;
	add.s64 	%rd48, %rd49, 64;
	ld.global.cs.u8 %r54, [%rd48];
	cvt.u16.u32 	%rs32, %r54;
$L__BB2_12:
	add.s32 	%r56, %r49, 96;
	setp.ge.u32 	%p8, %r56, %r4;
	@%p8 bra 	$L__BB2_14;
	add.s64 	%rd51, %rd9, %rd11;
	add.s64 	%rd50, %rd51, 96;
	ld.global.cs.u8 %r57, [%rd50];
	cvt.u16.u32 	%rs33, %r57;
$L__BB2_14:
	setp.ge.u32 	%p9, %r49, %r4;
	@%p9 bra 	$L__BB2_16;
	add.s64 	%rd52, %rd10, %rd11;
	st.u8 	[%rd52], %rs30;
$L__BB2_16:
	@%p6 bra 	$L__BB2_18;
	add.s64 	%rd53, %rd10, %rd11;
	st.u8 	[%rd53+32], %rs31;
$L__BB2_18:
	@%p7 bra 	$L__BB2_20;
	add.s64 	%rd54, %rd10, %rd11;
	st.u8 	[%rd54+64], %rs32;
$L__BB2_20:
	@%p8 bra 	$L__BB2_22;
	add.s64 	%rd55, %rd10, %rd11;
	st.u8 	[%rd55+96], %rs33;
$L__BB2_22:
	add.s32 	%r73, %r49, 128;
	setp.lt.u32 	%p13, %r73, %r4;
	@%p13 bra 	$L__BB2_6;
$L__BB2_23:
	mov.u32 	%r68, %nctaid.x;
	mul.lo.s32 	%r69, %r12, %r68;
	cvt.u64.u32 	%rd56, %r69;
	add.s64 	%rd58, %rd58, %rd56;
	setp.lt.u64 	%p14, %rd58, %rd14;
	@%p14 bra 	$L__BB2_2;
$L__BB2_24:
	ret;
}
)ptx";

}  // namespace kvferry
